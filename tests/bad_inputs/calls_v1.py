"""Valid calls of what comes from version 1 of `tf.distribute`."""

from typing import Any

import numpy as np

import jaxdist
from jaxdist.data import Examples
from tests.bad_inputs.call import Call, entered, identity, per_replica, rows, strategy, variable


def _iterator() -> jaxdist.DistributedIterator:
    return strategy().make_dataset_iterator([np.arange(4), np.arange(4, 8)])


def _elements(_: Any) -> list[np.ndarray]:
    return [np.zeros(2), np.ones(2)]


def _close(iterator: Any) -> None:
    iterator.close()


def _nothing(*_: Any) -> None:
    return None


def _examples() -> Examples:
    return strategy().experimental_make_numpy_dataset(np.arange(8))


def _make_worker() -> Any:
    spec = jaxdist.cluster_resolver.ClusterSpec({"ps": ["bad-inputs:1"], "worker": ["worker:1"]})
    resolver = jaxdist.cluster_resolver.SimpleClusterResolver(
        spec, task_type="worker", task_id=0, rpc_layer="local"
    )
    return jaxdist.compat.v1.experimental.ParameterServerStrategy(resolver)


def _in_step(**arguments: Any) -> Any:
    def step() -> None:
        arguments.setdefault("replica_ctx", jaxdist.get_replica_context())
        jaxdist.contrib.require_replica_context(**arguments)

    return strategy().run(step)


CALLS = {
    "jaxdist.Strategy.experimental_distribute_datasets_from_function": Call(
        lambda: strategy().experimental_distribute_datasets_from_function,
        lambda: {"dataset_fn": _elements},
        use=list,
    ),
    "jaxdist.Strategy.unwrap": Call(lambda: strategy().unwrap, lambda: {"value": per_replica()}),
    "jaxdist.Strategy.group": Call(lambda: strategy().group, lambda: {"value": per_replica()}),
    "jaxdist.Strategy.make_dataset_iterator": Call(
        lambda: strategy().make_dataset_iterator, lambda: {"dataset": [np.arange(4)]}, use=_close
    ),
    "jaxdist.Strategy.make_input_fn_iterator": Call(
        lambda: strategy().make_input_fn_iterator, lambda: {"input_fn": _elements}, use=list
    ),
    "jaxdist.Strategy.experimental_make_numpy_dataset": Call(
        lambda: strategy().experimental_make_numpy_dataset,
        lambda: {"numpy_input": np.arange(8)},
        use=list,
    ),
    "jaxdist.Strategy.experimental_run": Call(
        lambda: strategy().experimental_run,
        lambda: {"fn": identity, "input_iterator": _iterator()},
    ),
    "jaxdist.Strategy.colocate_vars_with": Call(
        lambda: _colocated, lambda: {"colocate_with_variable": variable()}
    ),
    "jaxdist.StrategyExtended.update_non_slot": Call(
        lambda: strategy().extended.update_non_slot,
        lambda: {"colocate_with": variable(), "fn": identity, "args": (per_replica(),)},
    ),
    "jaxdist.StrategyExtended.experimental_run_steps_on_iterator": Call(
        lambda: strategy().extended.experimental_run_steps_on_iterator,
        lambda: {"fn": _nothing, "iterator": _iterator()},
    ),
    "jaxdist.StrategyExtended.experimental_make_numpy_dataset": Call(
        lambda: strategy().extended.experimental_make_numpy_dataset,
        lambda: {"numpy_input": np.arange(8)},
        use=list,
    ),
    "jaxdist.DistributedIterator.initialize": Call(lambda: _iterator().initialize),
    "jaxdist.data.Examples.batch": Call(lambda: _examples().batch, lambda: {"batch_size": 4}),
    "jaxdist.contrib.Monitor": Call(
        lambda: jaxdist.contrib.Monitor,
        lambda: {"step_callable": _nothing},
        use=lambda monitor: monitor.run_steps(1),
    ),
    "jaxdist.contrib.Monitor.run_steps": Call(
        lambda: jaxdist.contrib.Monitor(iter([1, 2]).__next__).run_steps,
        lambda: {"num_steps": 1},
    ),
    "jaxdist.contrib.get_cross_replica_context": Call(
        lambda: jaxdist.contrib.get_cross_replica_context
    ),
    "jaxdist.contrib.get_loss_reduction": Call(lambda: jaxdist.contrib.get_loss_reduction),
    "jaxdist.contrib.require_replica_context": Call(lambda: _in_step),
    "jaxdist.compat.v1.Strategy": Call(
        lambda: lambda: jaxdist.compat.v1.MirroredStrategy(["cpu:0"])
    ),
    "jaxdist.compat.v1.Strategy.reduce": Call(
        lambda: jaxdist.compat.v1.MirroredStrategy(["cpu:0", "cpu:1"]).reduce,
        lambda: {"reduce_op": "SUM", "value": rows()},
    ),
    "jaxdist.compat.v1.MirroredStrategy": Call(
        lambda: jaxdist.compat.v1.MirroredStrategy, lambda: {"devices": ["cpu:0", "cpu:1"]}
    ),
    "jaxdist.compat.v1.OneDeviceStrategy": Call(
        lambda: jaxdist.compat.v1.OneDeviceStrategy, lambda: {"device": "cpu:0"}
    ),
    "jaxdist.compat.v1.experimental.MultiWorkerMirroredStrategy": Call(
        lambda: jaxdist.compat.v1.experimental.MultiWorkerMirroredStrategy
    ),
    "jaxdist.compat.v1.experimental.ParameterServerStrategy": Call(
        lambda: jaxdist.compat.v1.experimental.ParameterServerStrategy
    ),
    "jaxdist.compat.v1.experimental.ParameterServerStrategy.run": Call(
        lambda: _make_worker().run,
        lambda: {"fn": identity, "args": (1.0,), "kwargs": {}, "options": None},
    ),
    "jaxdist.compat.v1.experimental.TPUStrategy": Call(
        lambda: jaxdist.compat.v1.experimental.TPUStrategy,
        lambda: {
            "tpu_cluster_resolver": jaxdist.cluster_resolver.TPUClusterResolver("virtual:v5e:2x2"),
            "steps_per_run": 1,
        },
    ),
    "jaxdist.tpu.XLAOptions": Call(
        lambda: jaxdist.tpu.XLAOptions,
        use=lambda options: strategy().run(
            identity, (1.0,), options=jaxdist.RunOptions(experimental_xla_options=options)
        ),
    ),
}


def _colocated(**arguments: Any) -> None:
    with strategy().scope():
        entered(strategy().colocate_vars_with(**arguments))
