"""Reductions of `IndexedSlices`: the rows of all replicas are concatenated."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdist
from jaxdist import IndexedSlices, PerReplica, Strategy, Variable, get_replica_context

pytestmark = pytest.mark.both_executors


@pytest.fixture
def two() -> Strategy:
    return jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])


def _documented() -> PerReplica:
    return PerReplica(
        [
            IndexedSlices(np.array([[1.0, 2.0]], np.float32), np.array([1]), (5, 2)),
            IndexedSlices(np.array([[3.0, 4.0], [5.0, 6.0]], np.float32), np.array([1, 3]), (5, 2)),
        ]
    )


@pytest.mark.parametrize(("op", "scale"), [("SUM", 1.0), ("MEAN", 0.5)])
def test_rows_are_concatenated_in_replica_order_and_not_merged(
    two: Strategy, op: str, scale: float
) -> None:
    for value in (_documented(), {"table": _documented()}):
        found = two.reduce(op, value, axis=None)
        found = found["table"] if isinstance(found, dict) else found
        assert isinstance(found, IndexedSlices)
        np.testing.assert_allclose(found.values, np.array([[1, 2], [3, 4], [5, 6]]) * scale)
        assert found.indices.tolist() == [1, 1, 3]
        assert found.dense_shape == (5, 2)


def _own_rows(x: Any) -> IndexedSlices:
    context = get_replica_context()
    indices = jnp.array([0, 1]) + context.replica_id_in_sync_group
    return IndexedSlices(x * jnp.ones((2, 1)), indices, (context.num_replicas_in_sync + 1, 1))


def test_what_a_step_returns_is_reduced(strategy: Strategy) -> None:
    count = strategy.num_replicas_in_sync
    x = PerReplica([np.float32(r + 1) for r in range(count)])
    rows = strategy.run(_own_rows, (x,))
    total = strategy.reduce("SUM", rows, axis=None)
    expected = np.zeros((count + 1, 1))
    for r in range(count):
        expected[r : r + 2] += r + 1
    np.testing.assert_allclose(total.to_dense(), expected)


@pytest.mark.parametrize(("op", "scale"), [("sum", 1.0), ("mean", 0.5)])
def test_all_reduce_and_merge_functions_bring_the_rows_of_all_replicas(
    two: Strategy, op: str, scale: float
) -> None:
    def merged(strategy: Strategy, rows: Any) -> Any:
        return strategy.reduce(op, rows, axis=None)

    def step(x: Any) -> Any:
        context = get_replica_context()
        both = context.all_reduce(op, {"rows": _own_rows(x), "dense": x})
        return both, context.merge_call(merged, args=(_own_rows(x),))

    both, rows = two.run(step, (PerReplica([np.float32(1), np.float32(2)]),))
    assert float(both["dense"]) == 3.0 * scale
    for found in (both["rows"], rows):
        np.testing.assert_allclose(np.ravel(found.values), np.array([1, 1, 2, 2]) * scale)
        assert found.indices.tolist() == [0, 1, 1, 2]


def test_an_axis_has_no_meaning_for_rows(two: Strategy) -> None:
    with pytest.raises(TypeError, match="IndexedSlices"):
        two.reduce("SUM", _documented(), axis=0)


def test_rows_by_layout_and_rows_of_nobody_follow_the_rule_of_arrays(two: Strategy) -> None:
    split = jax.device_put(np.array([[1.0], [2.0]], np.float32), two.per_replica_sharding)
    numbers = jax.device_put(np.array([0, 1]), two.per_replica_sharding)
    found = two.reduce("SUM", IndexedSlices(split, numbers), axis=None)
    assert (np.ravel(found.values).tolist(), found.indices.tolist()) == ([1.0, 2.0], [0, 1])
    same = IndexedSlices(*(jax.device_put(x, two.replicated_sharding) for x in (split, numbers)))
    assert two.reduce("SUM", same, axis=None).indices.tolist() == [0, 1, 0, 1]
    alone = IndexedSlices([1.0], [0])
    assert two.reduce("MEAN", alone, axis=None) is alone
    with two.scope():
        unrelated = Variable(1.0)
    assert two.reduce("MEAN", alone, axis=None) is alone, f"beside {unrelated}"
    with pytest.raises(ValueError, match="not distributed"):
        two.reduce("SUM", alone, axis=None)
