"""What becomes of NNX variables that a step leaves different on each replica."""

from typing import Any

import jax
from flax import nnx

from jaxdist._typing import AxisNames


def enter(kind: type, value: Any, axes: AxisNames) -> Any:
    """A variable as a replica sees it: random keys get the replica's number folded in."""
    if issubclass(kind, nnx.RngKey):
        return jax.random.fold_in(value, jax.lax.axis_index(axes))
    return value


def is_kept(kind: type) -> bool:
    """Whether a variable keeps the value it came in with: a random stream moves on by its count."""
    return issubclass(kind, nnx.RngKey)


def reduces(kind: type) -> bool:
    """Whether a variable that differs is combined by a collective at the end of the step."""
    return issubclass(kind, (nnx.BatchStat, nnx.metrics.MetricState))


def combine(kind: type, before: Any, after: Any, axes: AxisNames) -> Any:
    """The one value of a variable that replicas leave different.

    Batch statistics are averaged over the replicas; metrics grow by the sum of the replicas'
    increments.
    """
    if issubclass(kind, nnx.BatchStat):
        return jax.lax.pmean(after, axes)
    start = before.reshape(after.shape)
    return start + jax.lax.psum(after - start, axes).astype(start.dtype)
