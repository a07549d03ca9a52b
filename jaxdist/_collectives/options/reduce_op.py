"""The ops by which collectives combine values."""

import enum
from typing import Any

from jaxdist._called import called, refuse
from jaxdist._validate import show
from jaxdist._values import VariableAggregation


class ReduceOp(enum.Enum):
    """The op that combines the values of the replicas.

    Every `reduce_op` argument accepts the name as a string too, in any case.

    Example:
        >>> ReduceOp.SUM.value
        'SUM'

    Source:
        `tf.distribute.ReduceOp`.
    """

    SUM = "SUM"
    MEAN = "MEAN"

    @staticmethod
    @called("ReduceOp.from_variable_aggregation")
    def from_variable_aggregation(aggregation: VariableAggregation) -> "ReduceOp":
        """Return the op that combines the values that replicas assign to a variable.

        Args:
            aggregation: `VariableAggregation.SUM` or `MEAN`.

        Raises:
            ArgumentError: `aggregation` is anything else: no such op exists.

        Example:
            >>> ReduceOp.from_variable_aggregation(VariableAggregation.MEAN).name
            'MEAN'

        Source:
            `tf.distribute.ReduceOp.from_variable_aggregation`.
        """
        known = ReduceOp.__members__
        if isinstance(aggregation, VariableAggregation) and aggregation.name in known:
            return known[aggregation.name]
        raise refuse(
            f"{aggregation!r}.",
            "A ReduceOp is a sum or a mean, and only two aggregations are one: NONE combines "
            "nothing, and ONLY_FIRST_REPLICA takes one value.",
            "Pass VariableAggregation.SUM or VariableAggregation.MEAN.",
        )


def reduce_op(op: Any) -> ReduceOp:
    """Return the `ReduceOp` that `op` names, or raise an error that lists the valid ones."""
    if isinstance(op, ReduceOp):
        return op
    if isinstance(op, str) and op.upper() in ReduceOp.__members__:
        return ReduceOp[op.upper()]
    raise refuse(
        f"reduce_op={show(op)}.",
        "reduce_op is a jaxdist.ReduceOp, or the name of one.",
        f"Pass {' or '.join(f'{o.value!r}' for o in ReduceOp)}.",
    )
