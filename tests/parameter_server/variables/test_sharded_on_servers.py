"""A sharded variable whose shards are on different servers moves only rows."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jaxdist
from jaxdist import IndexedSlices, ParameterServerStrategy, Variable
from jaxdist._parameter_server.protocol import Read, ReadRows
from jaxdist._parameter_server.server import VariableServer
from jaxdist.cluster_resolver import ClusterSpec, SimpleClusterResolver
from jaxdist.coordinator import ClusterCoordinator, ShardedVariable
from jaxdist.errors import RowIndexError
from tests.parameter_server.wrapping import wrap

WHOLE = np.arange(20, dtype=np.float32).reshape(10, 2)


def _strategy() -> ParameterServerStrategy:
    jobs = {"ps": ["ps0:1", "ps1:1"], "worker": ["w0:1", "w1:1"], "chief": ["c:1"]}
    resolver = SimpleClusterResolver(ClusterSpec(jobs), task_type="chief", rpc_layer="local")
    return ParameterServerStrategy(resolver)


def _table(strategy: ParameterServerStrategy) -> ShardedVariable:
    with strategy.scope():
        shards = [Variable(WHOLE[:6], name="part_0"), Variable(WHOLE[6:], name="part_1")]
    return ShardedVariable(shards, name="table")


def _note_rows(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Note the rows that servers send, and refuse to send whole variables."""
    moved: list[list[int]] = []

    def note(request: Any, go_on: Any) -> Any:
        assert isinstance(request, ReadRows)
        moved.append(np.asarray(request.ids).tolist())
        return go_on()

    monkeypatch.setattr(VariableServer, "call", wrap(VariableServer.call, Read | ReadRows, note))
    return moved


def test_a_lookup_moves_the_rows_of_each_server(monkeypatch: pytest.MonkeyPatch) -> None:
    table = _table(_strategy())
    with monkeypatch.context() as patch:
        moved = _note_rows(patch)
        found = jaxdist.nn.embedding_lookup(table, [9, 0, 9, 4])
        np.testing.assert_array_equal(found, WHOLE[[9, 0, 9, 4]])
        assert moved == [[0, 4], [3]]
        np.testing.assert_array_equal(table[6], WHOLE[6])
        np.testing.assert_array_equal(table[4:8:2], WHOLE[4:8:2])
        assert moved[2:] == [[0], [4], [0]]
    np.testing.assert_array_equal(table, WHOLE)


def test_the_whole_and_its_rows_are_changed_on_the_servers() -> None:
    table = _table(_strategy())
    table.assign_add(WHOLE)
    table.scatter_add(IndexedSlices(np.ones((3, 2), np.float32), np.array([7, 2, 7])))
    wanted = WHOLE * 2
    np.add.at(wanted, [7, 2, 7], 1)
    np.testing.assert_array_equal(table, wanted)


def test_a_scheduled_function_reads_and_changes_only_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    strategy = _strategy()
    table = _table(strategy)
    coordinator = ClusterCoordinator(strategy)

    def step(ids: Any) -> Any:
        rows = jaxdist.nn.embedding_lookup(table, ids)
        table.scatter_sub(IndexedSlices(jnp.ones_like(rows), ids))
        return rows

    ids = np.array([9, 0, 9, 4])
    with monkeypatch.context() as patch:
        moved = _note_rows(patch)
        found = coordinator.schedule(step, args=(ids,)).fetch()
        coordinator.join()
        assert {row for rows in moved for row in rows} == {0, 3, 4}
    np.testing.assert_array_equal(found, WHOLE[ids])
    wanted = WHOLE.copy()
    np.subtract.at(wanted, ids, 1)
    np.testing.assert_array_equal(table, wanted)


def _read(table: Any, ids: Any) -> Any:
    return table.sparse_read(ids)


def _look_up(table: Any, ids: Any) -> Any:
    return jaxdist.nn.embedding_lookup(table, ids)


def _scatter(table: Any, ids: Any) -> None:
    table.scatter_add(IndexedSlices(jnp.ones((len(ids), 2)), ids))


@pytest.mark.parametrize("row", [-1, 10, 300])
@pytest.mark.parametrize("how", [_read, _look_up, _scatter])
def test_a_wrong_row_is_that_of_the_whole_table(how: Any, row: int) -> None:
    strategy = _strategy()
    table = _table(strategy)
    coordinator = ClusterCoordinator(strategy)

    def step(ids: Any) -> Any:
        return how(table, ids)

    what = "calls scatter_add of" if how is _scatter else "reads"
    wanted = f"step {what} row {row} of {table.name!r}, which has 10 rows"
    with pytest.raises(RowIndexError, match=wanted) as caught:
        coordinator.schedule(step, (np.array([0, row, 9]),)).fetch()
    assert "from 0 to 9" in str(caught.value)
    # Also where this process runs the function; and no server has changed a row.
    with pytest.raises(RowIndexError, match=wanted.removeprefix("step ")):
        strategy.run(lambda ids: how(table, ids), (np.array([row]),))
    np.testing.assert_array_equal(table, WHOLE)


def test_a_table_that_is_an_argument_moves_only_rows_and_changes_as_a_captured_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    strategy = _strategy()
    coordinator, table = ClusterCoordinator(strategy), _table(strategy)
    moved = _note_rows(monkeypatch)

    def step(given: Any, ids: Any) -> Any:
        rows = jaxdist.nn.embedding_lookup(given["table"], ids)
        given["table"].scatter_add(IndexedSlices(jnp.ones_like(rows), ids))
        return rows

    ids = np.array([1, 7])
    found = [coordinator.schedule(step, ({"table": table}, ids)).fetch() for _ in range(2)]
    np.testing.assert_array_equal(found, [WHOLE[ids], WHOLE[ids] + 1])
    assert moved
    monkeypatch.undo()
    coordinator.schedule(lambda v: v.assign_add(np.ones_like(WHOLE)), (table,)).fetch()
    np.testing.assert_array_equal(table.numpy()[ids], WHOLE[ids] + 3)
    np.testing.assert_array_equal(table.numpy()[0], WHOLE[0] + 1)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "uint32"])
def test_ids_of_a_small_dtype_find_rows_of_a_table_that_has_more(dtype: str) -> None:
    strategy = _strategy()
    whole = np.arange(600, dtype=np.float32)[:, None]
    with strategy.scope():
        shards = [Variable(part, name=f"part_{n}") for n, part in enumerate(np.split(whole, 2))]
    table = ShardedVariable(shards, name="table")

    def change(ids: Any) -> Any:
        rows = jaxdist.nn.embedding_lookup(table, ids)
        table.scatter_add(IndexedSlices(jnp.ones_like(rows), ids))
        return rows

    ids = np.array([5, 100, 7], dtype)
    found = ClusterCoordinator(strategy).schedule(change, (ids,)).fetch()
    np.testing.assert_array_equal(found[:, 0], [5, 100, 7])
    want = whole[:, 0].copy()
    want[[5, 100, 7]] += 1
    np.testing.assert_array_equal(table.numpy()[:, 0], want)


@pytest.mark.parametrize("ids", [np.array([2**32 - 1], "uint32"), np.array([-(2**31)], "int32")])
def test_an_id_at_the_end_of_its_dtype_is_out_of_bounds(ids: Any) -> None:
    strategy = _strategy()
    table = _table(strategy)

    def change(ids: Any) -> None:
        table.scatter_add(IndexedSlices(jnp.ones((1, 2)), ids))

    with pytest.raises(RowIndexError, match="scatter_add of row"):
        ClusterCoordinator(strategy).schedule(change, (ids,)).fetch()
    np.testing.assert_array_equal(table.numpy(), WHOLE)
