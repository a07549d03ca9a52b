"""Valid calls of strategies and of what is asked of the current one."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxdist
from tests.bad_inputs.call import (
    Call,
    cpu_devices,
    entered,
    identity,
    in_scope,
    of_replica,
    per_replica,
    rows,
    strategy,
    variable,
)


def _slice_strategy() -> jaxdist.TPUStrategy:
    resolver = jaxdist.cluster_resolver.TPUClusterResolver("virtual:v4:2x2x1")
    topology = jaxdist.tpu.experimental.initialize_tpu_system(resolver)
    assignment = jaxdist.tpu.experimental.DeviceAssignment.build(
        topology, [1, 1, 1, 2], num_replicas=4
    )
    return jaxdist.TPUStrategy(resolver, experimental_device_assignment=assignment)


def _merge(_: jaxdist.Strategy, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    return (*args, *kwargs.values())


def _report() -> jaxdist.GradientReport:
    report: jaxdist.GradientReport = strategy().check_gradients(
        lambda x: jaxdist.get_replica_context().all_reduce("MEAN", x), (jnp.ones(2),)
    )
    return report


_RUN = {"fn": identity, "args": (1.0,), "kwargs": {}, "options": None}
_HINTS = {"options": None, "experimental_hints": None}

CALLS = {
    "jaxdist.Strategy": Call(lambda: lambda: jaxdist.MirroredStrategy(["cpu:0"])),
    "jaxdist.MirroredStrategy": Call(
        lambda: jaxdist.MirroredStrategy, lambda: {"devices": ["cpu:0", "cpu:1"]}
    ),
    "jaxdist.MultiWorkerMirroredStrategy": Call(lambda: jaxdist.MultiWorkerMirroredStrategy),
    "jaxdist.experimental.MultiWorkerMirroredStrategy": Call(
        lambda: jaxdist.experimental.MultiWorkerMirroredStrategy
    ),
    "jaxdist.OneDeviceStrategy": Call(
        lambda: jaxdist.OneDeviceStrategy, lambda: {"device": "cpu:0"}
    ),
    "jaxdist.TPUStrategy": Call(
        lambda: jaxdist.TPUStrategy,
        lambda: {
            "tpu_cluster_resolver": jaxdist.cluster_resolver.TPUClusterResolver("virtual:v5e:2x2")
        },
    ),
    "jaxdist.experimental.TPUStrategy": Call(
        lambda: jaxdist.experimental.TPUStrategy,
        lambda: {
            "tpu_cluster_resolver": jaxdist.cluster_resolver.TPUClusterResolver("virtual:v5e:2x2")
        },
    ),
    "jaxdist.Strategy.run": Call(lambda: strategy().run, lambda: dict(_RUN)),
    "jaxdist.Strategy.lower": Call(lambda: strategy().lower, lambda: dict(_RUN)),
    "jaxdist.Strategy.check_gradients": Call(
        lambda: strategy().check_gradients,
        lambda: {
            "fn": lambda _: jaxdist.get_replica_context().all_reduce("MEAN", jnp.ones(2)),
            "args": (jnp.ones(2),),
        },
    ),
    "jaxdist.GradientReport.parts": Call(lambda: _report().parts),
    "jaxdist.GradientReport.text": Call(lambda: _report().text),
    "jaxdist.GradientReport.raise_if_different": Call(lambda: _report().raise_if_different),
    "jaxdist.Strategy.scope": Call(lambda: strategy().scope, use=entered),
    "jaxdist.Strategy.reduce": Call(
        lambda: strategy().reduce,
        lambda: {"reduce_op": "SUM", "value": rows(), "axis": None, **_HINTS},
    ),
    "jaxdist.Strategy.gather": Call(
        lambda: strategy().gather, lambda: {"value": rows(), "axis": 0, **_HINTS}
    ),
    "jaxdist.Strategy.experimental_local_results": Call(
        lambda: strategy().experimental_local_results, lambda: {"value": per_replica()}
    ),
    "jaxdist.Strategy.experimental_distribute_values_from_function": Call(
        lambda: strategy().experimental_distribute_values_from_function,
        lambda: {"value_fn": lambda context: context.replica_id_in_sync_group},
    ),
    "jaxdist.Strategy.experimental_distribute_dataset": Call(
        lambda: strategy().experimental_distribute_dataset,
        lambda: {"dataset": [np.arange(4)]},
        use=list,
    ),
    "jaxdist.Strategy.distribute_datasets_from_function": Call(
        lambda: strategy().distribute_datasets_from_function,
        lambda: {"dataset_fn": lambda _: [np.arange(4)]},
        use=list,
    ),
    "jaxdist.Strategy.check_replicas": Call(
        lambda: strategy().check_replicas,
        lambda: {"state": jax.device_put(np.ones(3), strategy().replicated_sharding), "every": 1},
    ),
    "jaxdist.check_replicas": Call(
        lambda: jaxdist.check_replicas,
        lambda: {"state": jax.device_put(np.ones(3), strategy().replicated_sharding), "every": 1},
    ),
    "jaxdist.experimental_set_strategy": Call(
        lambda: jaxdist.experimental_set_strategy, lambda: {"strategy": strategy()}
    ),
    "jaxdist.get_replica_context": Call(lambda: jaxdist.get_replica_context),
    "jaxdist.get_strategy": Call(lambda: jaxdist.get_strategy),
    "jaxdist.has_strategy": Call(lambda: jaxdist.has_strategy),
    "jaxdist.in_cross_replica_context": Call(lambda: jaxdist.in_cross_replica_context),
    # Contexts of replicas.
    "jaxdist.ReplicaContext": Call(
        lambda: jaxdist.ReplicaContext, lambda: {"strategy": strategy(), "traced": True}
    ),
    "jaxdist.ReplicaContext.all_reduce": Call(
        of_replica("all_reduce"),
        lambda: {"reduce_op": "SUM", "value": jnp.ones(2), **_HINTS},
    ),
    "jaxdist.ReplicaContext.all_gather": Call(
        of_replica("all_gather"), lambda: {"value": jnp.ones(2), "axis": 0, **_HINTS}
    ),
    "jaxdist.ReplicaContext.merge_call": Call(
        of_replica("merge_call"), lambda: {"merge_fn": _merge, "args": (1.0,), "kwargs": {}}
    ),
    # `strategy.extended`.
    "jaxdist.StrategyExtended": Call(
        lambda: jaxdist.StrategyExtended, lambda: {"strategy": strategy()}
    ),
    "jaxdist.StrategyExtended.reduce_to": Call(
        lambda: strategy().extended.reduce_to,
        lambda: {"reduce_op": "SUM", "value": rows(), "destinations": "cpu:1", **_HINTS},
    ),
    "jaxdist.StrategyExtended.batch_reduce_to": Call(
        lambda: strategy().extended.batch_reduce_to,
        lambda: {
            "reduce_op": "SUM",
            "value_destination_pairs": [(rows(), "cpu:1"), (rows(), ["cpu:0", "cpu:1"])],
            **_HINTS,
        },
    ),
    "jaxdist.StrategyExtended.broadcast_to": Call(
        lambda: strategy().extended.broadcast_to,
        lambda: {"tensor": np.ones(2), "destinations": ["cpu:0", "cpu:1"]},
    ),
    "jaxdist.StrategyExtended.call_for_each_replica": Call(
        lambda: strategy().extended.call_for_each_replica,
        lambda: {"fn": identity, "args": (1.0,), "kwargs": {}},
    ),
    "jaxdist.StrategyExtended.colocate_vars_with": Call(
        in_scope(lambda **given: entered(strategy().extended.colocate_vars_with(**given))),
        lambda: {"colocate_with_variable": variable()},
    ),
    "jaxdist.StrategyExtended.non_slot_devices": Call(
        lambda: strategy().extended.non_slot_devices, lambda: {"var_list": [variable()]}
    ),
    "jaxdist.StrategyExtended.read_var": Call(
        lambda: strategy().extended.read_var, lambda: {"v": variable()}
    ),
    "jaxdist.StrategyExtended.update": Call(
        lambda: strategy().extended.update,
        lambda: {
            "var": variable(),
            "fn": lambda v, *_: v.assign_add(jnp.ones(3)),
            "args": (1.0,),
            "kwargs": {},
            "group": True,
        },
    ),
    "jaxdist.StrategyExtended.value_container": Call(
        lambda: strategy().extended.value_container, lambda: {"value": variable()}
    ),
    "jaxdist.StrategyExtended.variable_created_in_scope": Call(
        lambda: strategy().extended.variable_created_in_scope, lambda: {"v": variable()}
    ),
    # Logical devices.
    "jaxdist.TPUStrategy.experimental_assign_to_logical_device": Call(
        lambda: _in_slice_step("experimental_assign_to_logical_device"),
        lambda: {"tensor": jnp.ones((2, 2)), "logical_device_id": 1},
    ),
    "jaxdist.TPUStrategy.experimental_replicate_to_logical_devices": Call(
        lambda: _in_slice_step("experimental_replicate_to_logical_devices"),
        lambda: {"tensor": jnp.ones((2, 2))},
    ),
    "jaxdist.TPUStrategy.experimental_split_to_logical_devices": Call(
        lambda: _in_slice_step("experimental_split_to_logical_devices"),
        lambda: {"tensor": jnp.ones((2, 2)), "partition_dimensions": [1, 2]},
    ),
    "jaxdist.TPUStrategy.on_logical_device": Call(
        lambda: _placed_work,
        lambda: {"logical_device_id": 1},
    ),
    # Collectives from outside.
    "jaxdist.CrossDeviceOps": Call(lambda: jaxdist.CrossDeviceOps),
    "jaxdist.NcclAllReduce": Call(lambda: jaxdist.NcclAllReduce, lambda: {"num_packs": 1}),
    "jaxdist.HierarchicalCopyAllReduce": Call(
        lambda: jaxdist.HierarchicalCopyAllReduce, lambda: {"num_packs": 1}
    ),
    "jaxdist.ReductionToOneDevice": Call(
        lambda: jaxdist.ReductionToOneDevice,
        use=lambda ops: ops.reduce("SUM", rows(), cpu_devices()),
    ),
    "jaxdist.experimental.CollectiveAllReduce": Call(
        lambda: jaxdist.experimental.CollectiveAllReduce
    ),
    "jaxdist.contrib.AllReduceCrossDeviceOps": Call(
        lambda: jaxdist.contrib.AllReduceCrossDeviceOps,
        use=lambda ops: ops.reduce("SUM", rows(), cpu_devices()),
    ),
    "jaxdist.contrib.MultiWorkerAllReduce": Call(
        lambda: jaxdist.contrib.MultiWorkerAllReduce,
        lambda: {"worker_devices": ["/job:worker/task:0"], "num_gpus_per_worker": 2},
        use=lambda ops: ops.reduce("SUM", rows(), cpu_devices()),
    ),
    "jaxdist.CrossDeviceOps.reduce": Call(
        lambda: jaxdist.NcclAllReduce().reduce,
        lambda: {
            "reduce_op": "SUM",
            "per_replica_value": rows(),
            "destinations": ["cpu:0", "cpu:1"],
            **_HINTS,
        },
    ),
    "jaxdist.CrossDeviceOps.batch_reduce": Call(
        lambda: jaxdist.NcclAllReduce().batch_reduce,
        lambda: {
            "reduce_op": "SUM",
            "value_destination_pairs": [(rows(), "cpu:1"), (rows(), ["cpu:0", "cpu:1"])],
            **_HINTS,
        },
    ),
    "jaxdist.CrossDeviceOps.broadcast": Call(
        lambda: jaxdist.NcclAllReduce().broadcast,
        lambda: {"tensor": 1.0, "destinations": ["cpu:0", "cpu:1"]},
    ),
    "jaxdist.CrossDeviceOps.gather": Call(
        lambda: jaxdist.NcclAllReduce().gather,
        lambda: {
            "per_replica_value": rows(),
            "destinations": ["cpu:0", "cpu:1"],
            "axis": 0,
            **_HINTS,
        },
    ),
    "jaxdist.experimental.CommunicationOptions": Call(
        lambda: jaxdist.experimental.CommunicationOptions
    ),
    "jaxdist.experimental.CollectiveHints": Call(lambda: jaxdist.experimental.CollectiveHints),
    "jaxdist.experimental.CommunicationOptions.merged": Call(
        lambda: jaxdist.experimental.CommunicationOptions(5).merged,
        lambda: {"later": jaxdist.experimental.CommunicationOptions(7)},
    ),
}


def _placed_work(**given: Any) -> Any:
    owner = _slice_strategy()
    return owner.run(owner.on_logical_device(**given)(identity), (jnp.float32(1),))


def _in_slice_step(method: str) -> Any:
    def call(**arguments: Any) -> Any:
        owner = _slice_strategy()

        def step(_: Any) -> Any:
            return getattr(owner, method)(**arguments)

        return owner.run(step, (jnp.float32(1),))

    return call
