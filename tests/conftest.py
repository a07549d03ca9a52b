"""Fixtures that more than one folder of tests uses."""

from collections.abc import Iterator

import pytest

import jaxdist
from tests.strategies_under_test import STRATEGIES, Row


@pytest.fixture(params=STRATEGIES, ids=lambda row: row.name)
def strategy_row(request: pytest.FixtureRequest) -> Row:
    """Each row of the table of strategies."""
    row: Row = request.param
    return row


@pytest.fixture
def strategy(strategy_row: Row) -> jaxdist.Strategy:
    """Each strategy of the table."""
    return strategy_row.make()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests that are marked `both_executors` run a second time, with steps op by op."""
    if metafunc.definition.get_closest_marker("both_executors") is None:
        return
    if metafunc.definition.get_closest_marker("compiled") is None:
        executors = ["compiled", pytest.param("op_by_op", marks=pytest.mark.slow)]
        metafunc.parametrize("_executor", executors, indirect=True)


# Op by op, the strategies that differ in how replicas lie over the devices.
ROWS_OP_BY_OP = {
    "one_device_not_the_first",
    "mirrored_3",
    "mesh_with_logical_axis_first",
    "mesh_with_two_replica_axes",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out strategies that are like another one to the executor that is slow."""
    items[:] = [item for item in items if _is_wanted(item)]


def _is_wanted(item: pytest.Item) -> bool:
    callspec = getattr(item, "callspec", None)
    row = None if callspec is None else callspec.params.get("strategy_row")
    is_virtual = row is not None and row.name.startswith("virtual")
    if is_virtual and item.get_closest_marker("a_device_for_each") is not None:
        return False
    if callspec is None or callspec.params.get("_executor") != "op_by_op":
        return True
    return row is None or row.name in ROWS_OP_BY_OP


@pytest.fixture(autouse=True)
def _executor(request: pytest.FixtureRequest) -> Iterator[None]:
    """Which executor the test runs with, where it runs with both."""
    if getattr(request, "param", None) is None:
        yield
        return
    with jaxdist.config.run_eagerly(request.param == "op_by_op"):
        yield


@pytest.fixture(autouse=True)
def _no_strategy_is_left_behind() -> Iterator[None]:
    """A test that forgets to leave a scope fails itself, not the test after it."""
    yield
    left = jaxdist.has_strategy()
    if left:
        jaxdist.experimental_set_strategy(None)
    assert not left, "this test left a strategy behind as the ambient one"
