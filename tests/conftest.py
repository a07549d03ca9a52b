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


@pytest.fixture(autouse=True)
def _no_strategy_is_left_behind() -> Iterator[None]:
    """A test that forgets to leave a scope fails itself, not the test after it."""
    yield
    left = jaxdist.has_strategy()
    if left:
        jaxdist.experimental_set_strategy(None)
    assert not left, "this test left a strategy behind as the ambient one"
