"""`x[0] = 1` and `del x[0]` are errors that name the value and what to call instead."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jaxdist
from jaxdist import IndexedSlices, MirroredStrategy, PerReplica, Variable
from jaxdist.coordinator import ClusterCoordinator
from jaxdist.errors import ArgumentTypeError, ContextError
from jaxdist.experimental.partitioners import FixedShardsPartitioner
from tests.parameter_server.strategy.making import make_strategy
from tests.strategies.oracle import refused


def _make_table() -> Any:
    with make_strategy(variable_partitioner=FixedShardsPartitioner(2)).scope():
        return Variable(np.zeros((4, 2), "float32"), name="table")


def _make_result() -> Any:
    return ClusterCoordinator(make_strategy()).schedule(lambda: np.ones(2, "float32"))


_VALUES: dict[str, tuple[Callable[[], Any], str, str]] = {
    "variable": (
        lambda: Variable(np.zeros(3), name="w"),
        "Variable 'w' was changed by index",
        "variable[index].assign(value)",
    ),
    "elements": (
        lambda: Variable(np.zeros((3, 2)), name="w")[0],
        "Variable 'w'[...] was changed",
        "variable[i, j].assign(value)",
    ),
    "shards": (_make_table, "ShardedVariable 'table' was changed", "variable.scatter_update"),
    "replicas": (lambda: PerReplica([1.0, 2.0]), "PerReplica was changed", "x.at[index].set(new)"),
    "pieces": (
        lambda: jaxdist.Sharded(np.arange(4.0), 0, 4),
        "Sharded was changed",
        "jnp.asarray(value).at[index].set(new)",
    ),
    "slices": (
        lambda: IndexedSlices(np.ones((2, 3)), [0, 1]),
        "IndexedSlices was changed",
        "slices.with_parts(rows, slices.indices)",
    ),
    "result": (_make_result, "the result of a scheduled function, was changed", "value.fetch()"),
}


@pytest.mark.parametrize("kind", _VALUES)
def test_an_assignment_by_index_is_an_error_with_the_method_to_call(kind: str) -> None:
    make, found, remedy = _VALUES[kind]
    value = make()
    with refused(ArgumentTypeError, found, "by index: [0] = 1.5, of type float.", remedy):
        value[0] = 1.5
    with refused(ArgumentTypeError, found, "by index: del [0].", remedy):
        del value[0]


def test_what_the_errors_propose_works() -> None:
    v = Variable(np.zeros(3), name="w")
    v[1].assign(1.0)
    v.scatter_update(IndexedSlices(np.ones(1), [2]))
    assert v.numpy().tolist() == [0, 1, 1]
    w = Variable(np.zeros((2, 2)))
    w[0, 1].assign(1.0)
    assert w.numpy().tolist() == [[0, 1], [0, 0]]
    table = _make_table()
    table.scatter_update(IndexedSlices(np.ones((1, 2), "float32"), [2]))
    assert table.numpy()[:, 0].tolist() == [0, 0, 1, 0]
    slices = IndexedSlices(np.zeros((2, 1)), [0, 1])
    other = slices.with_parts(np.array([[1.0], [0.0]]), slices.indices)
    assert np.asarray(other.values).tolist() == [[1], [0]]
    pieces = jaxdist.Sharded(np.arange(4.0), 0, 4)
    assert jnp.asarray(pieces).at[0].set(5.0).tolist() == [5, 1, 2, 3]
    strategy = MirroredStrategy(["cpu:0", "cpu:1"])
    values = PerReplica([np.zeros(2), np.zeros(2)])
    result = strategy.run(lambda x: x.at[0].set(1.0), (values,))
    assert np.asarray(strategy.gather(result, 0)).tolist() == [1, 0, 1, 0]


def test_in_a_step_the_error_is_the_same() -> None:
    strategy = MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        v = Variable(np.zeros(3), name="w")

    def step() -> None:
        v[0] = 1.0

    with refused(ArgumentTypeError, "Variable 'w' was changed by index"):
        strategy.run(step)


def test_a_variable_on_a_server_is_assigned_as_a_whole_or_by_rows() -> None:
    with make_strategy().scope():
        v = Variable(np.zeros(3, "float32"), name="w")
    with refused(ContextError, "changed by index", "variable.scatter_update"):
        v[0] = 1.0
    v.scatter_update(IndexedSlices(np.ones(1, "float32"), [1]))
    assert v.numpy().tolist() == [0, 1, 0]
