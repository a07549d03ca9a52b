"""Attention of a device's own queries to keys and values that are gathered from all devices."""

import functools
from typing import Any

import jax

from jaxdist.nn._attention import kernel
from jaxdist.nn._attention.division import Division, Kind


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    division: Division, q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None
) -> jax.Array:
    return _forward(division, q, k, v, segments)[0]


def _forward(division: Division, q: Any, k: Any, v: Any, segments: Any) -> tuple[Any, Any]:
    plan = division.plan
    k, v = (jax.lax.all_gather(x, division.axis, axis=1, tiled=True) for x in (k, v))
    sums = kernel.no_sums(plan, q, k, v)
    sums = kernel.add_keys(plan, q, *_rows(division, q, k, v, segments), sums)
    out, lse = kernel.finish(sums, q.shape[1], q.dtype)
    return out, (q, k, v, segments, out, lse)


def _rows(division: Division, q: Any, k: Any, v: Any, segments: Any) -> tuple[Any, Any, Any, Any]:
    length = q.shape[1]
    rows = division.rows_of(jax.lax.axis_index(division.axis), length, segments)
    return rows, k, v, division.all_rows(length, segments)


def _back(division: Division, kept: Any, gradient: jax.Array) -> Any:
    q, k, v, segments, out, lse = kept
    rows, k, v, keys = _rows(division, q, k, v, segments)
    given = kernel.cotangents(gradient, out, lse)
    start = kernel.no_gradient(q, lse, k.shape[2])
    dq, dk, dv = kernel.add_gradients(division.plan, q, rows, given, k, v, keys, start, k.dtype)
    dk = _scatter(division, dk)
    # One after the other: a sum needs as much memory as what it adds up.
    dk, dv = jax.lax.optimization_barrier((dk, dv))
    dv = _scatter(division, dv)
    return kernel.join_gradient(dq, q), dk, dv, None


def _scatter(division: Division, whole: jax.Array) -> jax.Array:
    """Return the sum over the devices of the rows of this one.

    An exchange and a sum on the device send as much as a reduce-scatter. XLA's for TPUs takes more
    memory, and adds up in the dtype of what it sends.
    """
    parts = jax.lax.all_to_all(whole, division.axis, 1, 1, tiled=True)
    rows = parts.reshape(parts.shape[0], division.size, -1, *parts.shape[2:])
    return rows.astype(kernel.wide(rows.dtype)).sum(1).astype(rows.dtype)


_attend.defvjp(_forward, _back)
GATHER = Kind("gather", _attend)
