"""How values are combined."""

import enum
from typing import Any

from jaxdist.errors import ArgumentError


class ReduceOp(enum.Enum):
    """How the values of the replicas become one.

    Wherever one is taken, its name as a string is taken too, in any case.

    Example:
        >>> ReduceOp.SUM.value
        'SUM'

    Source:
        `tf.distribute.ReduceOp`.
    """

    SUM = "SUM"
    MEAN = "MEAN"


def reduce_op(caller: str, op: Any) -> ReduceOp:
    """The `ReduceOp` that `op` names, or an error that lists the valid ones."""
    if isinstance(op, ReduceOp):
        return op
    if isinstance(op, str) and op.upper() in ReduceOp.__members__:
        return ReduceOp[op.upper()]
    names = [f"ReduceOp.{o.name}" for o in ReduceOp]
    raise ArgumentError(
        f"{caller} was given reduce_op={op!r}, which is not a ReduceOp.\n\n"
        f"Use one of {', '.join(names)}, or its name: {', '.join(repr(o.value) for o in ReduceOp)}."
    )
