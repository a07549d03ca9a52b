"""Detects nested transformations that would reduce gradients twice."""

import contextlib
from contextvars import ContextVar

from jaxdist import _compat
from jaxdist._collectives import ReduceOp
from jaxdist.errors import ArgumentError

SHARDED, COMPRESSED = "sharded_update", "compressed_update"
# This function reduces gradients before the transformation gets them.
REDUCED = "training.reduce_and_update"

# The wrapped transformation may hide an inner one in a closure, so it is detected when called.
_WRAPPER: ContextVar[str | None] = ContextVar("jaxdist_update", default=None)


def mark_wrapper(caller: str) -> contextlib.AbstractContextManager[None]:
    """Mark that the block calls the transformation that `caller` wraps."""
    return _compat.set_in_block(_WRAPPER, caller)


def check_nesting(caller: str, op: ReduceOp) -> None:
    """Check that no outer transformation has already reduced the gradients.

    A `sharded_update` that takes the mean may be inside a `compressed_update`. Both may take
    gradients that are already reduced, if they take the mean.
    """
    # The mean of gradients that are equal on all replicas is those gradients.
    outer = _WRAPPER.get()
    if outer is None or ((outer, caller, op) == (COMPRESSED, SHARDED, ReduceOp.MEAN)):
        return
    if outer == REDUCED:
        if op is ReduceOp.MEAN:
            return
        raise ArgumentError(
            f"{outer} was given an optimizer in which there is a {caller} with reduce_op='sum', "
            "inside another transformation.\n\n"
            "The gradients are summed over the replicas before the optimizer gets them, so they "
            "would be multiplied by the number of replicas.\n\n"
            f"Put it outside: {caller}(optax.chain(...)), or leave out reduce_op='sum'."
        )
    remedy = f"Leave the {caller} inside out: {outer}(tx) of the transformation itself."
    if outer == SHARDED and caller == COMPRESSED:
        remedy = f"For both, put them the other way round: {COMPRESSED}({SHARDED}(tx))."
    if caller == SHARDED and outer == COMPRESSED:
        remedy = f"Leave reduce_op='sum' of the {SHARDED} inside out, and give it to {COMPRESSED}."
    raise ArgumentError(
        f"{outer} was given a transformation in which there is a {caller}.\n\n"
        "Each of them reduces the gradients of all replicas, and they would be reduced twice.\n\n"
        f"{remedy}"
    )
