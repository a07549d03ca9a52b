"""What a scheduled function gives that returns a variable."""

from typing import Any

import numpy as np
import pytest

import jaxdist
from jaxdist.coordinator import ClusterCoordinator, ShardedVariable
from jaxdist.errors import ContextError
from jaxdist.experimental.partitioners import FixedShardsPartitioner
from tests.parameter_server.strategy.making import make_strategy

_WHOLE = np.arange(8, dtype="float32").reshape(4, 2)


def _make_table(shards: int = 2) -> tuple[Any, Any]:
    strategy = make_strategy(variable_partitioner=FixedShardsPartitioner(shards))
    with strategy.scope():
        return strategy, jaxdist.Variable(_WHOLE, name="table")


@pytest.mark.parametrize("shards", [1, 2])
def test_a_returned_variable_is_its_whole_value(shards: int) -> None:
    strategy, table = _make_table(shards)
    coordinator = ClusterCoordinator(strategy)
    np.testing.assert_array_equal(coordinator.schedule(lambda: table).fetch(), _WHOLE)
    found = coordinator.schedule(lambda x: {"a": [table, x], "b": "text"}, (1.0,)).fetch()
    np.testing.assert_array_equal(found["a"][0], _WHOLE)
    assert found["a"][1] == 1
    assert found["b"] == "text"
    np.testing.assert_array_equal(strategy.run(lambda: table), _WHOLE)


@pytest.mark.parametrize("shards", [1, 2])
def test_a_returned_variable_has_the_value_that_the_function_saw(shards: int) -> None:
    strategy, table = _make_table(shards)
    coordinator = ClusterCoordinator(strategy)

    def add() -> Any:
        table.assign_add(np.ones((4, 2), "float32"))
        return table

    result = coordinator.schedule(add)
    coordinator.join()
    table.assign(np.zeros((4, 2)))
    found = result.fetch()
    assert type(found) is np.ndarray
    np.testing.assert_array_equal(found, _WHOLE + 1)


def test_a_returned_variable_whose_rows_were_changed_is_an_error() -> None:
    strategy, table = _make_table()
    coordinator = ClusterCoordinator(strategy)

    def add(ids: Any) -> Any:
        table.scatter_add(jaxdist.IndexedSlices(np.ones((1, 2), "float32"), ids))
        return table

    with pytest.raises(ContextError, match="was read after its rows were changed"):
        coordinator.schedule(add, (np.array([1]),))


def test_a_function_returns_a_sharded_variable_as_its_value() -> None:
    parts = [jaxdist.Variable(_WHOLE[:1]), jaxdist.Variable(_WHOLE[1:])]
    table = ShardedVariable(parts)
    np.testing.assert_array_equal(jaxdist.function(lambda: table)(), _WHOLE)


@pytest.mark.parametrize("rows", [[0, 3], 3, [[1]]])
def test_rows_are_python_numbers_in_a_scheduled_function(rows: Any) -> None:
    strategy, table = _make_table()
    coordinator = ClusterCoordinator(strategy)
    found = coordinator.schedule(lambda: table.sparse_read(rows)).fetch()
    np.testing.assert_array_equal(found, _WHOLE[np.array(rows)])
    mixed = coordinator.schedule(lambda i: table.sparse_read([i, 0]), (2,)).fetch()
    np.testing.assert_array_equal(mixed, _WHOLE[[2, 0]])
