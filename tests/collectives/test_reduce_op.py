"""The ops by which values are combined."""

from typing import Any

import pytest

from jaxdist import ReduceOp, VariableAggregation
from jaxdist.errors import ArgumentError


@pytest.mark.parametrize("name", ["SUM", "MEAN"])
def test_a_reduce_op_is_made_of_the_aggregation_of_a_variable(name: str) -> None:
    op = ReduceOp.from_variable_aggregation(VariableAggregation[name])
    assert op is ReduceOp[name]


@pytest.mark.parametrize(
    "wrong", [VariableAggregation.NONE, VariableAggregation.ONLY_FIRST_REPLICA, "SUM", None, 1]
)
def test_what_is_no_sum_and_no_mean_is_no_reduce_op(wrong: Any) -> None:
    with pytest.raises(ArgumentError, match=r"Aggregation\.SUM or Variable"):
        ReduceOp.from_variable_aggregation(wrong)
