"""A `PerReplica` of objects as an argument of a step: the error has the way that works."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdist
from jaxdist import IndexedSlices, PerReplica
from jaxdist.errors import ReplicaValueError
from tests.strategies.oracle import refused


def _slices(*rows: int) -> IndexedSlices:
    values = jnp.arange(2.0 * len(rows)).reshape(len(rows), 2)
    return IndexedSlices(values, jnp.array(rows), (4, 2))


def _all_reduce(values: Any, indices: Any) -> Any:
    slices = IndexedSlices(values, indices, (4, 2))
    return jaxdist.get_replica_context().all_reduce("sum", slices).to_dense()


@pytest.mark.parametrize("eagerly", [False, True])
@pytest.mark.parametrize("second", [[2], [2, 3]])
def test_slices_of_replicas_enter_a_step_by_their_parts(second: list[int], eagerly: bool) -> None:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    slices = [_slices(0), _slices(*second)]
    with jaxdist.config.run_eagerly(eagerly):
        with refused(ReplicaValueError, "args[0]", "s.values for s in slices", "IndexedSlices"):
            strategy.run(lambda x: x.values.sum(), (PerReplica(slices),))
        parts = PerReplica([s.values for s in slices]), PerReplica([s.indices for s in slices])
        total = strategy.run(_all_reduce, parts)
    dense = sum(np.asarray(s.to_dense()) for s in slices)
    np.testing.assert_array_equal(np.asarray(total), dense)
    reduced = strategy.reduce("sum", PerReplica(slices), axis=None)
    np.testing.assert_array_equal(np.asarray(reduced.to_dense()), dense)


@pytest.mark.parametrize("values", [[{"a": 1}, {"a": 2}], [(1, 2), (3, 4)]])
def test_trees_of_replicas_enter_a_step_leaf_by_leaf(values: list[Any]) -> None:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    value = PerReplica(values)
    with refused(ReplicaValueError, "args[0]", "PerReplica(leaves), *value.values"):
        strategy.run(lambda x: x, (value,))
    tree = jax.tree.map(lambda *leaves: PerReplica(leaves), *value.values)
    sums = strategy.run(lambda x: jaxdist.get_replica_context().all_reduce("sum", x), (tree,))
    wanted = jax.tree.map(lambda a, b: a + b, *values)
    assert jax.tree.map(int, sums) == wanted
