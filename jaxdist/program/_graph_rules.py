"""What becomes of NNX variables that a step leaves different on each replica."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxdist._typing import AxisNames


def enter(kind: type, value: Any, axes: AxisNames) -> Any:
    """A variable as a replica sees it: random keys get the replica's number folded in."""
    if issubclass(kind, nnx.RngKey):
        return _fold_in(value, jax.lax.axis_index(axes))
    return value


def _fold_in(keys: jax.Array, number: jax.Array) -> jax.Array:
    fold = jax.random.fold_in
    is_typed = jax.dtypes.issubdtype(keys.dtype, jax.dtypes.prng_key)
    for _ in range(keys.ndim if is_typed else keys.ndim - 1):
        fold = jax.vmap(fold, in_axes=(0, None))
    return fold(keys, number)


def is_kept(kind: type) -> bool:
    """Whether a variable keeps the value it came in with: a random stream moves on by its count."""
    return issubclass(kind, nnx.RngKey)


def is_averaged(kind: type) -> bool:
    """Whether a variable that differs is averaged over the replicas."""
    return issubclass(kind, nnx.BatchStat)


def is_summed(kind: type) -> bool:
    """Whether a variable grows by what all replicas add to it, also where they add the same."""
    return issubclass(kind, nnx.metrics.MetricState)


def combine(kind: type, before: Any, after: Any, axes: AxisNames) -> Any:
    """The one value of a variable that replicas leave different.

    Batch statistics are averaged over the replicas; metrics grow by the sum of the replicas'
    increments.
    """
    if is_averaged(kind):
        return jax.lax.pmean(_wide(after), axes).astype(after.dtype)
    start = before.reshape(after.shape)
    return start + jax.lax.psum(_wide(after) - _wide(start), axes).astype(start.dtype)


def combine_all(kind: type, before: Any, after: Sequence[Any]) -> Any:
    """The same, of the values of all replicas in one place."""
    rows = jnp.stack([_wide(x) for x in after])
    if is_averaged(kind):
        return rows.mean(axis=0).astype(after[0].dtype)
    start = before.reshape(after[0].shape)
    return start + (rows - _wide(start)[None]).sum(axis=0).astype(start.dtype)


def _wide(x: Any) -> Any:
    """At least f32: sums of many replicas need it, and XLA's CPU backend may abort on bf16."""
    is_narrow = jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits < 32
    return x.astype(jnp.float32) if is_narrow else x
