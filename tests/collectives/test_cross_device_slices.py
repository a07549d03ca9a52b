"""`CrossDeviceOps.reduce` and `batch_reduce` of `IndexedSlices`, against NumPy."""

from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxdist
from jaxdist import IndexedSlices, MirroredStrategy, PerReplica, get_replica_context
from jaxdist.errors import ReplicaValueError, ShapeError
from tests.collectives.test_cross_device_ops import OPS
from tests.tables import examples, sampled

DEVICES = ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]
_RNG = np.random.default_rng(0)


def _slices(rows: int, dtype: Any = np.float32) -> IndexedSlices:
    values = _RNG.integers(-8, 8, (rows, 2)).astype(dtype)
    return IndexedSlices(values, _RNG.integers(0, 5, rows), (5, 2))


def _must_be_all_rows(found: Any, parts: list[IndexedSlices], divisor: int) -> None:
    assert isinstance(found, IndexedSlices)
    rows = np.concatenate([np.asarray(p.values) for p in parts]) / divisor
    np.testing.assert_array_equal(np.asarray(found.values), rows)
    numbers = np.concatenate([np.asarray(p.indices) for p in parts])
    np.testing.assert_array_equal(np.asarray(found.indices), numbers)
    assert found.dense_shape == parts[0].dense_shape


@pytest.mark.parametrize("op", ["SUM", "MEAN"])
@pytest.mark.parametrize("name", sampled(list(OPS), 4))
def test_rows_of_all_replicas_come_one_after_the_other(name: str, op: str) -> None:
    parts = [_slices(r) for r in (1, 3, 0, 2)]
    found = OPS[name].reduce(op, PerReplica(parts), DEVICES)
    _must_be_all_rows(found, parts, 4 if op == "MEAN" else 1)
    assert len(found.values.devices()) == len(found.indices.devices()) == 4


@pytest.mark.parametrize("name", sampled(list(OPS), 2))
def test_slices_and_arrays_are_reduced_together_in_the_order_of_the_pairs(name: str) -> None:
    first, last = ([_slices(r) for r in rows] for rows in ((1, 2, 1, 1), (2, 2, 2, 2)))
    dense = PerReplica([np.full(3, i, np.float32) for i in range(4)])
    pairs = [(PerReplica(first), "cpu:1"), (dense, DEVICES), (PerReplica(last), DEVICES)]
    a, b, c = OPS[name].batch_reduce("SUM", pairs)
    _must_be_all_rows(a, first, 1)
    assert a.values.devices() == a.indices.devices() == {jax.devices()[1]}
    assert b.tolist() == [6, 6, 6]
    _must_be_all_rows(c, last, 1)


@settings(deadline=None, max_examples=examples(10, long=200))
@given(
    rows=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    op=st.sampled_from(["SUM", "MEAN"]),
    dtype=st.sampled_from([np.float32, np.int32]),
)
def test_the_strategy_and_its_ops_agree(rows: list[int], op: str, dtype: Any) -> None:
    strategy = MirroredStrategy([f"cpu:{i}" for i in range(len(rows))])
    value = PerReplica([_slices(r, dtype) for r in rows])
    theirs = jaxdist.NcclAllReduce().reduce(op, value, value)
    ours = strategy.reduce(op, value, axis=None)
    for part in ("values", "indices"):
        one, other = (np.asarray(getattr(x, part)) for x in (theirs, ours))
        np.testing.assert_array_equal(one, other)
        assert one.dtype == other.dtype


def test_slices_of_one_replica_come_back() -> None:
    part = _slices(3)
    _must_be_all_rows(jaxdist.NcclAllReduce().reduce("MEAN", part, "cpu:0"), [part], 1)


def test_slices_whose_parts_are_of_all_replicas_are_reduced() -> None:
    parts = [_slices(2), _slices(2)]
    value = IndexedSlices.with_parts(
        parts[0],
        PerReplica([p.values for p in parts]),
        PerReplica([p.indices for p in parts]),
    )
    _must_be_all_rows(jaxdist.NcclAllReduce().reduce("SUM", value, "cpu:0"), parts, 1)


def test_slices_are_reduced_in_a_merge_function() -> None:
    def merged(strategy: Any, slices: Any) -> Any:
        return jaxdist.NcclAllReduce().reduce("SUM", slices, slices.values)

    def step(x: Any) -> Any:
        number = get_replica_context().replica_id_in_sync_group
        slices = IndexedSlices(x[None], number[None], (2, 1))
        return get_replica_context().merge_call(merged, (slices,)).to_dense()

    found = MirroredStrategy(DEVICES[:2]).run(step, (PerReplica([np.ones(1), np.full(1, 3.0)]),))
    assert found.tolist() == [[1], [3]]


@pytest.mark.parametrize(
    "parts",
    [
        [_slices(1), np.zeros((5, 2), np.float32)],
        [_slices(1), IndexedSlices([[1.0, 2.0]], [0], (6, 2))],
    ],
    ids=["dense on one", "another whole"],
)
def test_slices_that_do_not_belong_together_are_named(parts: list[Any]) -> None:
    with pytest.raises(ReplicaValueError, match=r"replica 0: [^$]*replica 1: "):
        jaxdist.NcclAllReduce().reduce("SUM", PerReplica(parts), "cpu:0")


def test_rows_of_different_shapes_are_refused() -> None:
    parts = [IndexedSlices(np.zeros((1, n)), [0]) for n in (2, 3)]
    with pytest.raises(ShapeError):
        jaxdist.NcclAllReduce().reduce("SUM", PerReplica(parts), "cpu:0")
