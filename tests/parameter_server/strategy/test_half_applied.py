"""A function that cannot change one variable has not changed those on other servers either."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jaxdist
from jaxdist import IndexedSlices
from jaxdist.coordinator import ClusterCoordinator
from jaxdist.errors import ArgumentError, RowIndexError
from tests.parameter_server.strategy.making import make_strategy

_ONE: Any = jnp.ones((1, 2))


def _rows(values: Any, row: int) -> IndexedSlices:
    return IndexedSlices(values, jnp.array([row]))


_FUNCTIONS: dict[str, tuple[Callable[..., Any], type[Exception], str]] = {
    "a row that is out of bounds": (
        lambda table, marks, counts: table.scatter_add(_rows(_ONE, 3)),
        RowIndexError,
        "calls scatter_add of row 3 of 'table', which has 3 rows",
    ),
    "the least number of a dtype": (
        lambda table, marks, counts: table.scatter_update(_rows(_ONE, -(2**31))),
        RowIndexError,
        "calls scatter_update of row -2147483648 of 'table'",
    ),
    "a sum of bools": (
        lambda table, marks, counts: marks.assign_add(jnp.array([True, True])),
        ArgumentError,
        "assign_add was given op='add' for 'marks', which is bool",
    ),
    "a sum of rows of bools": (
        lambda table, marks, counts: marks.scatter_max(_rows(jnp.array([True]), 0)),
        ArgumentError,
        "scatter_max was given op='scatter_max' for 'marks', which is bool",
    ),
    "a quotient of integers": (
        lambda table, marks, counts: counts.scatter_div(_rows(jnp.array([2]), 0)),
        ArgumentError,
        "scatter_div was given op='scatter_div' for 'counts', which is int32",
    ),
}


@pytest.mark.parametrize("what", _FUNCTIONS)
def test_a_refused_change_leaves_the_variables_of_all_servers(what: str) -> None:
    change, kind, text = _FUNCTIONS[what]
    strategy = make_strategy(servers=4)
    with strategy.scope():
        total = jaxdist.Variable(0, name="total")
        table = jaxdist.Variable(np.zeros((3, 2), "float32"), name="table")
        marks = jaxdist.Variable(np.array([True, False]), name="marks")
        counts = jaxdist.Variable(np.arange(3), name="counts")

    def step() -> None:
        total.assign_add(1)
        change(table, marks, counts)

    with pytest.raises(kind, match=text):
        ClusterCoordinator(strategy).schedule(step).fetch()
    assert int(total.numpy()) == 0
    assert not table.numpy().any()
