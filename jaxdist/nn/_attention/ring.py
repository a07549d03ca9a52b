"""Attention of a device's own queries to keys and values that travel round a ring of devices.

While a device computes with one block of keys and values, it sends them on. The derivative is a
ring, too: the gradients of keys and values travel with them, in the dtype of sums, and are at home
after the last turn. A derivative by JAX would keep the blocks of all turns.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxdist._values import wide_dtype
from jaxdist.nn._attention import kernel
from jaxdist.nn._attention.division import Division, Kind, count_bytes_of_keys


def _send(division: Division, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    pairs = [(i, (i + 1) % division.size) for i in range(division.size)]
    return tuple(jax.lax.ppermute(x, division.axis, pairs) for x in arrays)


def _rows_in_turn(
    division: Division, turn: Any, length: int, segments: jax.Array | None
) -> kernel.Rows:
    """Return the positions and segments of the keys that this device has in a turn."""
    source = (jax.lax.axis_index(division.axis) - turn) % division.size
    return division.rows_of(source, length, segments)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    division: Division, q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None
) -> jax.Array:
    return _forward(division, q, k, v, segments)[0]


def _forward(division: Division, q: Any, k: Any, v: Any, segments: Any) -> tuple[Any, Any]:
    plan, length, last = division.plan, q.shape[1], division.size - 1
    rows = _rows_in_turn(division, 0, length, segments)

    def add(sums: kernel.Sums, k: Any, v: Any, turn: Any) -> kernel.Sums:
        keys = kernel.cut_keys(plan, k, v, _rows_in_turn(division, turn, length, segments))
        return kernel.add_keys(plan, q, rows, keys, length, sums)

    def take_turn(carried: Any, turn: Any) -> tuple[Any, None]:
        sums, k, v = carried
        # First, so that it is under way while the block is computed.
        arriving = _send(division, k, v)
        return (add(sums, k, v, turn), *arriving), None

    start = (kernel.no_sums(plan, q, k, v), k, v)
    (sums, *of_last), _ = jax.lax.scan(take_turn, start, jnp.arange(last))
    sums = add(sums, of_last[0], of_last[1], last)
    out, lse = kernel.finish(sums, length, q.dtype)
    return out, (q, k, v, segments, out, lse)


def _back(division: Division, kept: Any, gradient: jax.Array) -> Any:
    q, k, v, segments, out, lse = kept
    plan, length, last = division.plan, q.shape[1], division.size - 1
    rows = _rows_in_turn(division, 0, length, segments)
    given = kernel.cotangents(gradient, out, lse)

    def add(dq: Any, dk: Any, dv: Any, k: Any, v: Any, turn: Any) -> tuple[Any, ...]:
        keys = kernel.cut_keys(plan, k, v, _rows_in_turn(division, turn, length, segments))
        dq, *more = kernel.add_gradients(plan, q, rows, given, keys, length, dq, dk.dtype)
        return dq, *(x + kernel.join_keys(y, length) for x, y in zip((dk, dv), more, strict=True))

    def take_turn(carried: Any, turn: Any) -> tuple[Any, None]:
        dq, dk, dv, k, v = carried
        arriving = _send(division, k, v)
        dq, dk, dv = add(dq, dk, dv, k, v, turn)
        return (dq, *_send(division, dk, dv), *arriving), None

    zeros = jnp.zeros(k.shape, wide_dtype(k.dtype))
    start = (kernel.no_gradient(q, lse, k.shape[2]), zeros, zeros, k, v)
    (dq, dk, dv, k, v), _ = jax.lax.scan(take_turn, start, jnp.arange(last))
    dq, dk, dv = add(dq, dk, dv, k, v, last)
    home = _send(division, dk.astype(k.dtype), dv.astype(v.dtype))
    return kernel.join_gradient(dq, q), *home, None


_attend.defvjp(_forward, _back)


def _count_bytes(q: jax.Array, k: jax.Array, devices: int) -> tuple[int, int]:
    del q
    of_keys = count_bytes_of_keys(k, devices)
    of_gradients = of_keys // k.dtype.itemsize * wide_dtype(k.dtype).itemsize
    turns = devices - 1
    return turns * of_keys, turns * (of_keys + of_gradients) + of_keys


RING = Kind("ring", _attend, _count_bytes, is_in_turns=True)
