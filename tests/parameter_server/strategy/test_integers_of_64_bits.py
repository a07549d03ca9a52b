"""Integers of 64 bits on parameter servers: those that do not fit are a named error."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxdist
from jaxdist import IndexedSlices, PerReplica, Variable
from jaxdist.coordinator import ClusterCoordinator
from jaxdist.errors import ClosureInputError, InvalidArgumentError
from jaxdist.experimental.partitioners import FixedShardsPartitioner
from tests.parameter_server.rpc.serving import serve_methods
from tests.parameter_server.strategy.making import make_strategy
from tests.tables import sampled

ARRAYS: dict[str, tuple[np.ndarray, bool]] = {
    "int64 that fits": (np.array([3, -(2**31), 2**31 - 1, 0]), True),
    "uint64 that fits": (np.array([3, 2**32 - 1, 0, 5], np.uint64), True),
    "2**40 + 5": (np.array([1, 1, 2**40 + 5, 3]), False),
    "-2**31 - 1": (np.array([-(2**31) - 1, 1, 2, 3]), False),
    "2**32 as uint64": (np.array([3, 2**32, 0, 5], np.uint64), False),
}


def _make(a: Any, **options: Any) -> Variable:
    strategy = make_strategy(**options)
    with strategy.scope():
        return Variable(a)


def _zeros(a: Any) -> np.ndarray:
    return np.zeros(a.shape, "uint32" if a.dtype == np.uint64 else "int32")


def _assign(a: Any) -> Any:
    variable = _make(_zeros(a))
    variable.assign(a)
    return variable.value()


def _add(a: Any) -> Any:
    variable = _make(_zeros(a))
    variable.assign_add(a)
    return variable.value()


def _update_rows(a: Any) -> Any:
    variable = _make(_zeros(a))
    variable.scatter_update(IndexedSlices(a, np.arange(4)))
    return variable.value()


def _schedule(fn: Callable[..., Any], *args: Any) -> Any:
    return ClusterCoordinator(make_strategy()).schedule(fn, args).fetch()


def _schedule_again(a: Any) -> Any:
    coordinator = ClusterCoordinator(make_strategy())
    double = jaxdist.function(lambda x: x + 0)
    coordinator.schedule(double, (np.zeros(a.shape, a.dtype),)).fetch()
    return coordinator.schedule(double, (a,)).fetch()


def _schedule_by_name(a: Any) -> Any:
    coordinator = ClusterCoordinator(make_strategy())
    return coordinator.schedule(lambda x: x["a"] + 0, (), {"x": {"a": a}}).fetch()


def _add_in_a_function(a: Any) -> Any:
    strategy = make_strategy()
    with strategy.scope():
        variable = Variable(_zeros(a))
    coordinator = ClusterCoordinator(strategy)
    coordinator.schedule(lambda: variable.assign_add(a)).fetch()
    return variable.value()


def _run_in_a_function(a: Any) -> Any:
    strategy = make_strategy()
    coordinator = ClusterCoordinator(strategy)
    return coordinator.schedule(lambda x: strategy.run(lambda y: y + 0, (x,)), (a,)).fetch()


def _read_a_dataset(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def read(a: Any) -> Any:
        coordinator = ClusterCoordinator(make_strategy(workers=1))
        iterator = iter(coordinator.create_per_worker_dataset(make(a)))
        take = jaxdist.function(lambda i: jax.tree.leaves(next(i))[0] + 0)
        return [coordinator.schedule(take, (iterator,)).fetch() for _ in range(2)][-1]

    return read


def _read_a_distributed_dataset(a: Any) -> Any:
    strategy = make_strategy(workers=1)
    coordinator = ClusterCoordinator(strategy)
    iterator = iter(
        coordinator.create_per_worker_dataset(
            lambda: strategy.experimental_distribute_dataset([a] * 4)
        )
    )
    return coordinator.schedule(
        lambda i: strategy.run(lambda x: x + 0, (next(i),)), (iterator,)
    ).fetch()


def _call_by_rpc(a: Any) -> Any:
    spec = jax.ShapeDtypeStruct(a.shape, _zeros(a).dtype)
    with serve_methods({"same": (lambda x: x, [spec])}, "local") as (_, client):
        return client.call("same", [a]).get_value()


def _return_by_rpc(a: Any) -> Any:
    with serve_methods({"get": (jaxdist.function(lambda: jnp.asarray(a)), None)}, "local") as (
        _,
        client,
    ):
        return client.call("get").get_value()


def _return_numpy_by_rpc(a: Any) -> Any:
    with serve_methods({"get": (lambda: a, None)}, "local") as (_, client):
        return client.call("get").get_value()[0]


def _of_a_module(a: Any) -> Any:
    strategy = make_strategy()
    with strategy.scope():
        module = nnx.Dict(ids=nnx.Variable(a))
    return ClusterCoordinator(strategy).schedule(lambda: module["ids"][...] + 0).fetch()


WAYS: dict[str, Callable[[Any], Any]] = {
    "Variable": lambda a: _make(a).value(),
    "Variable of a function": lambda a: _make(lambda: a).value(),
    "Variable in shards": lambda a: _make(
        a, variable_partitioner=FixedShardsPartitioner(2)
    ).value(),
    "assign": _assign,
    "assign_add": _add,
    "scatter_update": _update_rows,
    "schedule": lambda a: _schedule(lambda x: x + 0, a),
    "schedule, second call": _schedule_again,
    "schedule, by name": _schedule_by_name,
    "schedule of PerReplica": lambda a: _schedule(
        lambda x: jax.tree.map(lambda y: y + 0, x), PerReplica([a])
    ),
    "schedule with a constant": lambda a: _schedule(lambda: jnp.asarray(a) + 0),
    "schedule, the result": lambda a: _schedule(lambda: a),
    "assign_add in a function": _add_in_a_function,
    "run in a function": _run_in_a_function,
    "per-worker dataset": _read_a_dataset(lambda a: lambda: [a] * 4),
    "per-worker dataset, nested": _read_a_dataset(lambda a: lambda: [{"ids": a}] * 4),
    "per-worker dataset, later": _read_a_dataset(lambda a: lambda: [np.zeros_like(a), a]),
    "per-worker dataset that is a list": _read_a_dataset(lambda a: [a] * 4),
    "per-worker dataset of Python numbers": _read_a_dataset(lambda a: lambda: [a.tolist()] * 4),
    "per-worker dataset of a strategy": _read_a_distributed_dataset,
    "run on the chief": lambda a: make_strategy().run(lambda x: x + 0, (a,)),
    "reduce on the chief": lambda a: make_strategy().reduce("sum", PerReplica([a]), axis=None),
    "state of a module": _of_a_module,
    "rpc": _call_by_rpc,
    "rpc, the result": _return_by_rpc,
    "rpc, a result of NumPy": _return_numpy_by_rpc,
}
# A server of rpc takes exactly the dtype that it declares.
_DECLARED = {"rpc"}
# Nothing is converted, so nothing is cut off.
_EXACT = {"rpc, a result of NumPy"}
# A Python number above 2**31 is no int32.
_NO_UINT32 = {"per-worker dataset of Python numbers"}
TABLE = [
    (way, kind)
    for way in WAYS
    for kind in ARRAYS
    if not (way in _NO_UINT32 and kind == "uint64 that fits")
]


@pytest.mark.parametrize("row", sampled(TABLE, 16, name=", ".join))
def test_integers_that_do_not_fit_are_an_error(row: tuple[str, str]) -> None:
    way, kind = row
    array, fits = ARRAYS[kind]
    if way in _DECLARED:
        with pytest.raises(InvalidArgumentError, match=f"was given {array.dtype}"):
            WAYS[way](array)
    elif way in _EXACT:
        np.testing.assert_array_equal(WAYS[way](array), array)
    elif fits:
        got = jax.tree.leaves(WAYS[way](array))
        # The first of a list of Python numbers.
        of_leaf = array[:1].reshape(()) if "Python numbers" in way else array
        np.testing.assert_array_equal(np.asarray(got[0]).reshape(of_leaf.shape), of_leaf)
    else:
        errors = (InvalidArgumentError, ClosureInputError)
        with pytest.raises(errors, match=r"int64 with integers from") as raised:
            WAYS[way](array)
        assert "jax_enable_x64" in str(raised.value)
