"""What becomes of NNX variables that a step leaves different on each replica."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxdist._typing import AxisNames


def enter(kind: type, value: Any, axes: AxisNames) -> Any:
    """A variable as a replica sees it: random keys get the replica's number folded in."""
    if issubclass(kind, nnx.RngKey):
        return jax.random.fold_in(value, jax.lax.axis_index(axes))
    return value


def leave(kind: type, before: Any, after: Any, differs: bool, axes: AxisNames) -> Any | None:
    """The one value that a variable has after the step, or None where there is no rule.

    Random keys keep the value that they came in with (a stream moves on by its count). Batch
    statistics are averaged over the replicas; metrics grow by the sum of the replicas' increments.
    """
    if issubclass(kind, nnx.RngKey):
        return before
    if not differs:
        return after
    if issubclass(kind, nnx.BatchStat):
        return jax.lax.pmean(after, axes)
    if issubclass(kind, nnx.metrics.MetricState):
        return before + jax.lax.psum(after - before, axes).astype(jnp.asarray(before).dtype)
    return None


def has_rule(kind: type) -> bool:
    """Whether a variable of this type may differ between replicas at the end of a step."""
    return issubclass(kind, nnx.RngKey) or reduces(kind)


def reduces(kind: type) -> bool:
    """Whether such a variable is combined by a collective at the end of the step."""
    return issubclass(kind, (nnx.BatchStat, nnx.metrics.MetricState))
