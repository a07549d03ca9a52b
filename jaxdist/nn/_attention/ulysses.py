"""Attention of some heads of all positions: devices exchange heads for positions, and back."""

import jax
import jax.numpy as jnp

from jaxdist._called import refuse
from jaxdist.errors import ShapeError
from jaxdist.nn._attention import kernel, tpu_kernel
from jaxdist.nn._attention.division import Division, Kind, count_bytes_of_keys


def _attend(
    division: Division, q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None
) -> jax.Array:
    length, axis = q.shape[1], division.axis
    copies = count_copies(q.shape[2], k.shape[2], division.size)
    if copies > 1:
        k, v = (jnp.repeat(x, copies, axis=2) for x in (k, v))
    q, k, v = (jax.lax.all_to_all(x, axis, 2, 1, tiled=True) for x in (q, k, v))
    if division.order.is_sorted and tpu_kernel.can_attend(division.plan, q):
        out = tpu_kernel.attend(division.plan, q, k, v, segments)
    else:
        rows = division.all_rows(length, segments)
        out = kernel.attend(division.plan, q, rows, k, v, rows)
    return jax.lax.all_to_all(out, axis, 1, 2, tiled=True)


def count_copies(heads: int, kv_heads: int, devices: int) -> int:
    """Return how many devices need each head of keys, so that each has those of its queries."""
    group = heads // kv_heads
    counts = (c for c in range(1, group + 1) if group % c == 0)
    return next(c for c in counts if kv_heads * c % devices == 0)


def _check(heads: int, kv_heads: int, devices: int) -> None:
    if heads % devices == 0:
        return
    below, above = heads // devices * devices, -(-heads // devices) * devices
    near = f"{below} or {above}" if below else f"{above}"
    raise refuse(
        f"kind='ulysses' with {heads} heads, on an axis of {devices} devices.",
        "Each device computes an equal number of whole heads.",
        f"Pass kind='gather', or 'ring' if all keys do not fit; or use {near} heads.",
        kind=ShapeError,
    )


def _count_bytes(q: jax.Array, k: jax.Array, devices: int) -> tuple[int, int]:
    copies = count_copies(q.shape[2], k.shape[2], devices)
    both = 2 * q.nbytes // devices + copies * count_bytes_of_keys(k, devices)
    sent = both * (devices - 1) // devices
    return sent, sent


ULYSSES = Kind("ulysses", _attend, _count_bytes, _check, has_all_positions=True)
