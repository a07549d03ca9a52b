"""A sharded variable is one array whose rows are on several variables."""

import copy
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import sparse

import jaxdist
from jaxdist import IndexedSlices, PerReplica, Variable, VariableAggregation
from jaxdist.coordinator import ShardedVariable
from jaxdist.errors import (
    ArgumentError,
    ArgumentTypeError,
    ContextError,
    ReplicaValueError,
    RowIndexError,
    ShapeError,
)
from jaxdist.training import Checkpoints
from tests.strategies_under_test import Row

WHOLE = np.arange(20, dtype=np.float32).reshape(10, 2)
SIZES = ([3, 3, 2, 2], [10], [1, 5, 4], [5, 5])


class Remote(Variable):
    """A variable of which only rows may be read, as of one on another machine."""

    __slots__ = ("moved",)

    def read_rows(self, ids: Any) -> Any:
        """Note the rows that move."""
        self.moved = [*getattr(self, "moved", []), *np.asarray(ids).tolist()]
        return np.asarray(super().value())[np.asarray(ids)]

    def sparse_read(self, indices: Any, name: str | None = None) -> Any:
        """Not called where `read_rows` is there."""
        raise AssertionError


def _sharded(
    sizes: Any = (3, 3, 2, 2), whole: Any = WHOLE, kind: Any = Variable, **given: Any
) -> Any:
    ends = np.cumsum(sizes)
    shards = [
        kind(part, name=f"table/part_{i}", **given)
        for i, part in enumerate(np.split(whole, ends[:-1]))
    ]
    return ShardedVariable(shards, name="table")


def test_it_has_the_properties_of_one_variable() -> None:
    table = _sharded()
    assert (table.shape, table.dtype, table.name, table.trainable) == (
        (10, 2),
        np.float32,
        "table",
        True,
    )
    assert (table.ndim, table.size, table.label) == (2, 20, "table")
    assert [v.shape for v in table.variables] == [(3, 2), (3, 2), (2, 2), (2, 2)]
    assert [v is w for v, w in zip(table, table.variables, strict=True)] == [True] * 4
    assert repr(table) == "<ShardedVariable 'table' float32[10, 2] of 3, 3, 2, 2 rows>"
    assert not _sharded(trainable=False).trainable
    with pytest.raises(TypeError, match=r"4 shard\(s\).*10 rows"):
        len(table)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_it_converts_to_the_whole(sizes: list[int]) -> None:
    table = _sharded(sizes)
    for found in (table.value(), table.read_value(), table.numpy(), np.asarray(table)):
        np.testing.assert_array_equal(found, WHOLE)
    np.testing.assert_array_equal(jnp.sin(table), jnp.sin(WHOLE))
    np.testing.assert_array_equal(jax.jit(lambda t: t * 2)(table), WHOLE * 2)
    assert table.sum() == WHOLE.sum()


def test_it_has_the_operators_of_an_array() -> None:
    table = _sharded()
    for found, wanted in (
        (table + 1, WHOLE + 1),
        (1 - table, 1 - WHOLE),
        (table * table, WHOLE * WHOLE),
        (table / 2, WHOLE / 2),
        (-table, -WHOLE),
        (table @ np.ones((2, 3), np.float32), WHOLE @ np.ones((2, 3))),
        (table > 3, WHOLE > 3),
        (table == 3, WHOLE == 3),
        (abs(table), WHOLE),
        (table**2, WHOLE**2),
        (table + Variable(WHOLE), WHOLE * 2),
    ):
        np.testing.assert_allclose(found, wanted)
    with pytest.raises(ContextError, match="assign_add"):
        table += 1


INDICES: list[Any] = [
    *(0, 2, 3, 9, -1, -10, np.int64(4)),
    *(
        slice(None),
        slice(2, 8, 3),
        slice(9, 3, -2),
        slice(None, None, -1),
        slice(5, 5),
        slice(1, -1),
    ),
    *(slice(-3, None), slice(None, None, 4), slice(8, None, -3), slice(20, 30), slice(None, -20)),
    *(slice(-1, -5, -1), slice(0, 10, 7), slice(7, 2), slice(3, 6)),
    *((slice(1, 5), 0), (3, 1), (slice(None), slice(None, None, -1)), (2, slice(0, 1)), (-1, -1)),
    *(Ellipsis, (Ellipsis, 0), None, (None, 3), (slice(2, 4), None), (5, Ellipsis, None), ()),
    *(np.array([5, 0, 3]), np.array([[1, -1], [1, 9]]), (np.array([1, 2]), np.array([0, 1]))),
    *((0, np.array([0, 1])), (slice(0, 4), np.array([1, 0])), np.arange(10) % 3 == 0, WHOLE > 5),
    *((np.arange(10) < 4, 1), np.zeros(0, np.int32), True),
]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_an_index_gives_what_numpy_gives(sizes: list[int]) -> None:
    for kind in (Variable, Remote):
        table = _sharded(sizes, kind=kind)
        for index in INDICES:
            found, wanted = np.asarray(table[index]), WHOLE[index]
            np.testing.assert_array_equal(found, wanted, str(index))
            assert found.shape == wanted.shape, str(index)


def test_random_slices_give_what_numpy_gives() -> None:
    draw = np.random.default_rng(0)
    for _ in range(60):
        sizes = draw.integers(1, 5, draw.integers(1, 5)).tolist()
        whole = np.arange(sum(sizes), dtype=np.int32)
        table = _sharded(sizes, whole, trainable=False)
        low, high = -len(whole) - 2, len(whole) + 3
        for _ in range(5):
            start, stop = draw.integers(low, high, 2).tolist()
            step = int(draw.choice([-3, -2, -1, 1, 2, 3]))
            index = slice(start, stop, step)
            np.testing.assert_array_equal(table[index], whole[index], f"{sizes} {index}")


def test_a_traced_index_is_an_index_of_the_whole() -> None:
    table = _sharded()
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    found = strategy.run(lambda i: table[i], (jnp.int32(4),))
    np.testing.assert_array_equal(found, WHOLE[4])


@pytest.mark.parametrize(
    ("index", "error"),
    [
        (10, IndexError),
        (-11, RowIndexError),
        ((3, 2), ArgumentError),
        (np.array([1, 10]), IndexError),
        (slice(None, None, 0), ValueError),
        (slice("a", None), ArgumentError),
        ("a", TypeError),
        (1.5, ArgumentTypeError),
        (PerReplica([0, 1]), ArgumentTypeError),
        ((0, 0, 0), ArgumentError),
    ],
    ids=str,
)
def test_a_wrong_index_is_refused(index: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"ShardedVariable 'table'\[index\]"):
        _sharded()[index]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_assigned_values_are_split_by_rows(sizes: list[int]) -> None:
    table = _sharded(sizes)
    more = np.arange(20, 40, dtype=np.float32).reshape(10, 2)
    assert table.assign(more) is table
    np.testing.assert_array_equal(table, more)
    assert table.assign_add(WHOLE) is table
    np.testing.assert_array_equal(table, more + WHOLE)
    assert table.assign_sub(jnp.asarray(more)) is table
    np.testing.assert_array_equal(table, WHOLE)
    table.assign_add(_sharded())
    table.assign_add(Variable(WHOLE))
    table.assign_add(WHOLE.astype(np.int32).tolist())
    np.testing.assert_array_equal(table, WHOLE * 4)


@pytest.mark.parametrize("method", ["assign", "assign_add", "assign_sub"])
def test_a_value_of_another_shape_or_kind_changes_no_shard(method: str) -> None:
    table = _sharded()
    call = getattr(table, method)
    for given, error in (
        (WHOLE[:9], ShapeError),
        (np.concatenate([WHOLE, WHOLE]), ShapeError),
        (WHOLE[:, :1], ShapeError),
        (3.0, ShapeError),
        (WHOLE + 1j, ArgumentTypeError),
        ("text", ArgumentTypeError),
        (PerReplica([WHOLE, WHOLE]), ReplicaValueError),
    ):
        with pytest.raises(error, match="table"):
            call(given)
    with pytest.raises(ArgumentTypeError, match="read_value"):
        call(WHOLE, read_value=3)
    np.testing.assert_array_equal(table, WHOLE)


SCATTERED = {
    "scatter_add": lambda a, b: a + b,
    "scatter_sub": lambda a, b: a - b,
    "scatter_mul": lambda a, b: a * b,
    "scatter_div": lambda a, b: a / b,
    "scatter_min": np.minimum,
    "scatter_max": np.maximum,
    "scatter_update": lambda a, b: b,
    "batch_scatter_update": lambda a, b: b,
}


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("method", SCATTERED)
def test_rows_are_changed_where_they_are(method: str, sizes: list[int]) -> None:
    table = _sharded(sizes)
    ids = np.array([9, 0, 4, 2])
    rows = np.array([[5.0, 50.0], [2.0, 20.0], [4.0, 40.0], [-1.0, 8.0]], np.float32)
    assert getattr(table, method)(IndexedSlices(rows, ids)) is table
    wanted = WHOLE.copy()
    wanted[ids] = SCATTERED[method](wanted[ids], rows)
    np.testing.assert_allclose(table, wanted)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_rows_of_the_same_index_are_added_up(sizes: list[int]) -> None:
    table = _sharded(sizes)
    ids, rows = np.array([7, 1, 7, 7]), np.ones((4, 2), np.float32)
    table.scatter_add(IndexedSlices(rows, ids))
    wanted = WHOLE.copy()
    np.add.at(wanted, ids, rows)
    np.testing.assert_array_equal(table, wanted)
    table.scatter_sub(sparse.BCOO((jnp.asarray(rows), jnp.asarray(ids)[:, None]), shape=(10, 2)))
    np.testing.assert_array_equal(table, WHOLE)
    table.scatter_mul(IndexedSlices(2 * rows, ids))
    wanted = WHOLE.copy()
    np.multiply.at(wanted, ids, 2 * rows)
    np.testing.assert_array_equal(table, wanted)


def test_only_the_shards_that_have_the_rows_are_changed() -> None:
    table = _sharded()
    before = [v.value() for v in table]
    table.scatter_add(IndexedSlices(np.ones((2, 2), np.float32), np.array([4, 4])))
    assert [v.value() is b for v, b in zip(table, before, strict=True)] == [True, False, True, True]
    table.scatter_add(IndexedSlices(np.ones((0, 2), np.float32), np.zeros(0, np.int32)))


def test_wrong_rows_change_no_shard() -> None:
    table = _sharded()
    for given, error in (
        (IndexedSlices(np.ones((2, 2), np.float32), np.array([0, 10])), ArgumentError),
        (IndexedSlices(np.ones((2, 2), np.float32), np.array([0, -1])), ArgumentError),
        (IndexedSlices(np.ones((1, 3), np.float32), np.array([0])), ShapeError),
        (WHOLE, ArgumentTypeError),
    ):
        with pytest.raises(error, match="table"):
            table.scatter_add(given)
    np.testing.assert_array_equal(table, WHOLE)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_rows_are_read_in_the_order_of_the_request(sizes: list[int]) -> None:
    table = _sharded(sizes)
    for ids in ([5, 0, 3], [9, 9, 0, 9], [[1, 2], [8, 1]], [], 4, np.array([7], np.uint8)):
        wanted = WHOLE[np.asarray(ids, np.int32)]
        for read in (table.sparse_read, table.gather, table.read_rows):
            np.testing.assert_array_equal(read(ids), wanted)
        for place in (table, Variable(WHOLE), WHOLE, jnp.asarray(WHOLE)):
            np.testing.assert_array_equal(jaxdist.nn.embedding_lookup(place, ids), wanted)


def test_only_the_rows_that_are_asked_for_move_and_each_of_them_once() -> None:
    for read in (
        lambda t: jaxdist.nn.embedding_lookup(t, [5, 0, 3, 5, 0]),
        lambda t: t.sparse_read([5, 0, 3, 5, 0]),
        lambda t: t[np.array([5, 0, 3, 5, 0])],
    ):
        table = _sharded(kind=Remote)
        np.testing.assert_array_equal(read(table), WHOLE[[5, 0, 3, 5, 0]])
        moved = [getattr(v, "moved", []) for v in table]
        assert moved == [[0], [0, 2], [], []]
    table = _sharded(kind=Remote)
    table[4]
    table[6:9:2]
    assert [getattr(v, "moved", []) for v in table] == [[], [1], [0], [0]]
    alone = Remote(WHOLE)
    jaxdist.nn.embedding_lookup(alone, np.array([[3, 3], [1, 3]]))
    assert alone.moved == [1, 3]


@pytest.mark.parametrize("name", ["sparse_read", "lookup", "array"])
def test_wrong_ids_are_refused(name: str) -> None:
    table: Any = WHOLE if name == "array" else _sharded()
    for ids, error in (
        ([10], ArgumentError),
        ([-1], ArgumentError),
        ([0.5], ArgumentTypeError),
        (np.array([True]), ArgumentTypeError),
        ("text", ArgumentTypeError),
        (PerReplica([1, 2]), ArgumentTypeError),
    ):
        lookup = functools.partial(jaxdist.nn.embedding_lookup, table)
        read = table.sparse_read if name == "sparse_read" else lookup
        with pytest.raises(error, match="indices" if name == "sparse_read" else "ids"):
            read(ids)


def test_a_table_of_a_lookup_has_rows() -> None:
    with pytest.raises(ShapeError, match="scalar"):
        jaxdist.nn.embedding_lookup(Variable(1.0), [0])
    with pytest.raises(ShapeError, match="scalar"):
        jaxdist.nn.embedding_lookup(jnp.float32(1), [0])
    with pytest.raises(ArgumentTypeError, match="table='a'"):
        jaxdist.nn.embedding_lookup("a", [0])


def test_what_is_no_list_of_shards_is_refused() -> None:
    one = Variable(WHOLE)
    for given, error, found in (
        ([], ArgumentTypeError, r"variables=\[\]"),
        (one, ArgumentTypeError, "variables="),
        ([one, WHOLE], ArgumentTypeError, "variables="),
        ([one, Variable(WHOLE.astype(np.int32))], ArgumentError, "float32.*int32"),
        ([one, Variable(WHOLE[:, :1])], ShapeError, r"\[10, 2\].*\[10, 1\]"),
        ([Variable(1.0)], ShapeError, r"\[\[\]\]"),
        ([one, one], ArgumentError, "more than once"),
    ):
        with pytest.raises(error, match=found):
            ShardedVariable(given)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="name=3"):
        ShardedVariable([one], name=3)  # type: ignore[arg-type]


def test_a_step_reads_and_changes_rows(strategy_row: Row) -> None:
    strategy = strategy_row.make()
    count = strategy_row.num_replicas
    with strategy.scope():
        table = _sharded(aggregation=VariableAggregation.SUM)

    def step(ids: Any) -> Any:
        rows = jaxdist.nn.embedding_lookup(table, ids)
        table.scatter_add(IndexedSlices(jnp.ones_like(rows), ids))
        return rows

    own = [np.array([r % 10, 9, (3 * r) % 10, r % 10]) for r in range(count)]
    ids = PerReplica(own) if count > 1 else own[0]
    found = strategy.experimental_local_results(strategy.run(step, (ids,)))
    wanted = WHOLE.copy()
    for r in range(count):
        np.testing.assert_array_equal(found[r], WHOLE[own[r]])
        np.add.at(wanted, own[r], 1)
    np.testing.assert_array_equal(table, wanted)


def test_traced_ids_out_of_bounds_give_nan_and_change_nothing() -> None:
    table = _sharded()
    strategy = jaxdist.OneDeviceStrategy("cpu:0")

    def step(ids: Any) -> Any:
        table.scatter_add(IndexedSlices(jnp.ones((3, 2)), ids))
        return jaxdist.nn.embedding_lookup(table, ids)

    found = strategy.run(step, (jnp.array([10, -1, 4]),))
    np.testing.assert_array_equal(found, [[np.nan] * 2, [np.nan] * 2, WHOLE[4] + 1])
    wanted = WHOLE.copy()
    wanted[4] += 1
    np.testing.assert_array_equal(table, wanted)


def test_a_lookup_has_a_gradient() -> None:
    table = _sharded()
    ids = np.array([4, 4, 9])
    found = jax.grad(lambda t: jaxdist.nn.embedding_lookup(t, ids).sum())(table)
    wanted = np.zeros_like(WHOLE)
    np.add.at(wanted, ids, 1)
    np.testing.assert_array_equal(found, wanted)


def test_a_function_is_traced_once_for_each_table() -> None:
    traces = []

    @jaxdist.function
    def double(table: Any) -> Any:
        traces.append(1)
        return table * 2

    for number, table in enumerate((_sharded(), _sharded([5, 5]))):
        np.testing.assert_array_equal(double(table), WHOLE * 2)
        table.assign(WHOLE + 1)
        np.testing.assert_array_equal(double(table), (WHOLE + 1) * 2)
        assert len(traces) == number + 1


def test_shards_on_different_devices_are_joined_on_the_first() -> None:
    parts = []
    for i, part in enumerate(np.split(WHOLE, 2)):
        with jaxdist.OneDeviceStrategy(f"cpu:{i + 1}").scope():
            parts.append(Variable(part))
    table = ShardedVariable(parts)
    assert table.value().devices() == {jax.devices()[1]}
    np.testing.assert_array_equal(table, WHOLE)
    np.testing.assert_array_equal(table[::-2], WHOLE[::-2])
    np.testing.assert_array_equal(table.sparse_read([9, 0]), WHOLE[[9, 0]])


def test_a_copy_has_the_same_value() -> None:
    table = _sharded()
    other = copy.deepcopy(table)
    other.assign(WHOLE + 1)
    np.testing.assert_array_equal(table, WHOLE)
    np.testing.assert_array_equal(other, WHOLE + 1)


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2), (1, 4), (4, 1)])
def test_a_checkpoint_is_restored_onto_another_number_of_shards(
    before: int, after: int, tmp_path: Path
) -> None:
    def make(count: int, whole: Any) -> Any:
        sizes = [len(part) for part in np.array_split(np.arange(10), count)]
        # One shard is an ordinary variable, as a strategy makes it.
        return Variable(whole, name="table") if count == 1 else _sharded(sizes, whole)

    saved, step = make(before, WHOLE), Variable(7)
    target = {"table": make(after, WHOLE * 0), "step": Variable(0)}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"table": saved, "step": step})
        saved.assign(WHOLE * 0)
        found = checkpoints.restore(target)
        like = {"table": jax.ShapeDtypeStruct((10, 2), np.float32), "step": np.int32(0)}
        plain = checkpoints.restore_latest(like=like)
    assert found is not None
    assert plain is not None
    assert found.state["table"] is target["table"]
    np.testing.assert_array_equal(target["table"], WHOLE)
    assert int(target["step"]) == 7
    # It was saved as one array, without a trace of the shards.
    np.testing.assert_array_equal(plain.state["table"], WHOLE)


def test_a_checkpoint_that_does_not_fit_leaves_the_shards_as_they_were(tmp_path: Path) -> None:
    other = _sharded([4, 5], np.ones((9, 2), np.float32))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"table": _sharded()})
        with pytest.raises(jaxdist.errors.CheckpointError, match=r"table: saved float32\[10, 2\]"):
            checkpoints.restore({"table": other})
    np.testing.assert_array_equal(other, np.ones((9, 2)))
