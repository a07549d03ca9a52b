"""Detects nested transformations that would reduce gradients twice."""

import contextlib
from contextvars import ContextVar

import optax

from jaxdist import _compat
from jaxdist._called import call_as, refuse
from jaxdist._collectives import ReduceOp

SHARDED, COMPRESSED = "sharded_update", "compressed_update"
# This function reduces gradients before the transformation gets them.
REDUCED = "training.reduce_and_update"

# The wrapped transformation may hide an inner one in a closure, so it is detected when called.
_WRAPPER: ContextVar[str | None] = ContextVar("jaxdist_update", default=None)


class ReducingUpdate(optax.GradientTransformationExtraArgs):
    """A transformation that takes the gradients of one replica, and reduces them itself.

    `training.reduce_and_update` sets the reduce op: `update` is a dataclass with a field `op`.
    """

    __slots__ = ()


def mark_wrapper(wrapper: str) -> contextlib.AbstractContextManager[None]:
    """Mark that the block calls the transformation that `wrapper` wraps."""
    return _compat.set_in_block(_WRAPPER, wrapper)


def check_nesting(own: str, op: ReduceOp) -> None:
    """Check that no outer transformation has already reduced the gradients.

    A `sharded_update` that takes the mean may be inside a `compressed_update`. Both may take
    gradients that are already reduced, if they take the mean.
    """
    # The mean of gradients that are equal on all replicas is those gradients.
    outer = _WRAPPER.get()
    if outer is None or ((outer, own, op) == (COMPRESSED, SHARDED, ReduceOp.MEAN)):
        return
    if outer == REDUCED:
        if op is ReduceOp.MEAN:
            return
        raise call_as(
            outer,
            refuse,
            f"an optimizer that contains a {own} with reduce_op='sum', inside another "
            "transformation.",
            "The gradients are summed over the replicas before the optimizer gets them, so they "
            "would be multiplied by the number of replicas.",
            f"Put it outside: {own}(optax.chain(...)), or leave out reduce_op='sum'.",
        )
    remedy = f"Leave out the inner {own}: {outer}(tx) of the transformation itself."
    if outer == SHARDED and own == COMPRESSED:
        remedy = f"For both, put them the other way round: {COMPRESSED}({SHARDED}(tx))."
    if own == SHARDED and outer == COMPRESSED:
        remedy = f"Leave out reduce_op='sum' of the inner {SHARDED}; pass it to {COMPRESSED}."
    raise call_as(
        outer,
        refuse,
        f"a transformation that contains a {own}.",
        "Each of them reduces the gradients of all replicas, and they would be reduced twice.",
        remedy,
    )
