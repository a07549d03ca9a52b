"""Valid calls of the coordinator of parameter servers, in one process."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import optax

import jaxdist
from jaxdist.cluster_resolver import ClusterSpec, SimpleClusterResolver
from jaxdist.coordinator import ClusterCoordinator, RemoteValue, ServerOptimizer, ShardedVariable
from tests.bad_inputs.call import Call, identity


def _resolver() -> SimpleClusterResolver:
    cluster = ClusterSpec({"worker": ["w:1"], "ps": ["p:1"]})
    return SimpleClusterResolver(cluster, rpc_layer="local")


@functools.cache
def _strategy() -> jaxdist.ParameterServerStrategy:
    return jaxdist.ParameterServerStrategy(_resolver())


# Its threads are there before the first call, which must not leave any.
_FIRST = ClusterCoordinator(_strategy())


def _coordinator() -> ClusterCoordinator:
    return ClusterCoordinator(_strategy())


def _add_worker(address: str | None = None) -> int:
    # Of its own: the thread of the new worker ends with it.
    coordinator = ClusterCoordinator(jaxdist.ParameterServerStrategy(_resolver()))
    try:
        return coordinator.add_worker(address)
    finally:
        coordinator._workers.stop()
        coordinator._workers.join(30)


def _of_coordinator(method: str) -> Callable[..., Any]:
    return getattr(_coordinator(), method)


def _schedule(**arguments: Any) -> Any:
    return _coordinator().schedule(**arguments)


def _result() -> RemoteValue:
    return _coordinator().schedule(identity, (np.float32(1),))


@functools.cache
def _variable() -> Any:
    with _strategy().scope():
        return jaxdist.Variable(np.ones(3, "float32"))


@functools.cache
def _optimizer() -> ServerOptimizer:
    return ServerOptimizer(optax.sgd(0.1), [_variable()])


def _partition(shape: Any, dtype: Any) -> list[int]:
    return [1] * len(shape)


def _wait(result: Any) -> None:
    result.fetch()


def _of_table(method: str) -> Callable[..., Any]:
    shards = [jaxdist.Variable(np.ones((2, 2), "float32")) for _ in range(2)]
    return getattr(ShardedVariable(shards, "table"), method)


def _slices() -> jaxdist.IndexedSlices:
    return jaxdist.IndexedSlices(np.ones((1, 2), "float32"), np.array([3]))


_LOCKS: dict[str, Any] = {"use_locking": False, "name": None}
_WHOLE = {**_LOCKS, "read_value": True}
_ARRAY = np.ones((4, 2), "float32")
_SHARDED = "jaxdist.coordinator.ShardedVariable"
_COORDINATOR = "jaxdist.coordinator.ClusterCoordinator"
_OPTIMIZER = "jaxdist.coordinator.ServerOptimizer"
CALLS: dict[str, Call] = {
    "jaxdist.ParameterServerStrategy": Call(
        lambda: jaxdist.ParameterServerStrategy,
        lambda: {
            "cluster_resolver": _resolver(),
            "variable_partitioner": _partition,
            "max_staleness": 3,
        },
    ),
    "jaxdist.ParameterServerStrategy.run": Call(
        lambda: _strategy().run,
        lambda: {"fn": identity, "args": (np.float32(1),), "kwargs": {}, "options": None},
    ),
    _COORDINATOR: Call(lambda: ClusterCoordinator, lambda: {"strategy": _strategy()}),
    f"{_COORDINATOR}.schedule": Call(
        lambda: _schedule,
        lambda: {"fn": identity, "args": (np.float32(1),), "kwargs": {}},
        _wait,
    ),
    f"{_COORDINATOR}.fetch": Call(lambda: _of_coordinator("fetch"), lambda: {"val": _result()}),
    f"{_COORDINATOR}.create_per_worker_dataset": Call(
        lambda: _of_coordinator("create_per_worker_dataset"), lambda: {"dataset_fn": list}
    ),
    f"{_COORDINATOR}.add_worker": Call(lambda: _add_worker, lambda: {"address": None}),
    **{
        f"{_COORDINATOR}.{name}": Call(lambda name=name: _of_coordinator(name))
        for name in ("done", "join", "statistics")
    },
    **{
        f"jaxdist.coordinator.RemoteValue.{name}": Call(lambda name=name: getattr(_result(), name))
        for name in ("fetch", "get")
    },
    "jaxdist.coordinator.RemoteValue.__getitem__": Call(lambda: lambda: _result().fetch()),
    "jaxdist.coordinator.experimental_get_current_worker_index": Call(
        lambda: (
            lambda: (
                _coordinator()
                .schedule(jaxdist.coordinator.experimental_get_current_worker_index)
                .fetch()
            )
        )
    ),
    _OPTIMIZER: Call(
        lambda: ServerOptimizer, lambda: {"tx": optax.sgd(0.1), "variables": [_variable()]}
    ),
    f"{_OPTIMIZER}.apply_gradients": Call(
        lambda: _optimizer().apply_gradients,
        lambda: {"grads_and_vars": [(np.ones(3, "float32"), _variable())]},
    ),
    f"{_SHARDED}.__getitem__": Call(lambda: _of_table("__getitem__"), lambda: {"index": 0}),
    f"{_SHARDED}.assign": Call(lambda: _of_table("assign"), lambda: {"value": _ARRAY, **_WHOLE}),
    **{
        f"{_SHARDED}.{name}": Call(
            lambda name=name: _of_table(name), lambda: {"delta": _ARRAY, **_WHOLE}
        )
        for name in ("assign_add", "assign_sub")
    },
    **{
        f"{_SHARDED}.{name}": Call(
            lambda name=name: _of_table(name), lambda: {"sparse_delta": _slices(), **_LOCKS}
        )
        for name in [
            "batch_scatter_update",
            *(f"scatter_{op}" for op in "add div max min mul sub update".split()),
        ]
    },
    **{
        f"{_SHARDED}.{name}": Call(
            lambda name=name: _of_table(name), lambda: {"indices": [0, 3], "name": None}
        )
        for name in ("gather", "sparse_read")
    },
    f"{_SHARDED}.read_rows": Call(lambda: _of_table("read_rows"), lambda: {"ids": [0, 3]}),
    **{
        f"{_SHARDED}.{name}": Call(lambda name=name: _of_table(name))
        for name in ("numpy", "read_value", "value")
    },
    _SHARDED: Call(lambda: ShardedVariable, lambda: {"variables": [_variable()], "name": "table"}),
}
