"""Attention of a device's own queries to keys and values that are gathered from all devices."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxdist.nn._attention import kernel
from jaxdist.nn._attention.division import Division, Kind, count_bytes_of_keys


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    division: Division, q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None
) -> jax.Array:
    return _forward(division, q, k, v, segments)[0]


def _forward(division: Division, q: Any, k: Any, v: Any, segments: Any) -> tuple[Any, Any]:
    plan, length, axis = division.plan, q.shape[1], division.axis
    rows = division.rows_of(jax.lax.axis_index(axis), length, segments)
    # Blocks are gathered: they are small before, and whole keys would be there a second time.
    own = kernel.cut_keys(plan, k, v, rows)
    arrays = tuple(jax.lax.all_gather(x, axis, tiled=True) for x in own.arrays)
    keys = kernel.Blocks(arrays, _cut_all_rows(division, length, segments))
    sums = kernel.no_sums(plan, q, k, v)
    sums = kernel.add_keys(plan, q, rows, keys, length * division.size, sums)
    out, lse = kernel.finish(sums, length, q.dtype)
    return out, (q, rows, keys, out, lse)


def _cut_all_rows(division: Division, length: int, segments: Any) -> kernel.Rows:
    """Return the positions and segments of the blocks of all devices."""

    def of_device(device: jax.Array) -> kernel.Rows:
        rows = division.rows_of(device, length, segments)
        return kernel.cut_rows_of_keys(division.plan, rows)

    every = jax.vmap(of_device)(jnp.arange(division.size))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), every)


def _back(division: Division, kept: Any, gradient: jax.Array) -> Any:
    q, rows, keys, out, lse = kept
    plan, length = division.plan, q.shape[1]
    given = kernel.cotangents(gradient, out, lse)
    dq = kernel.no_gradient(q, lse, keys.arrays[0].shape[2])
    whole = length * division.size
    dq, *blocks = kernel.add_gradients(plan, q, rows, given, keys, whole, dq, q.dtype)
    own = (jax.lax.psum_scatter(x, division.axis, tiled=True) for x in blocks)
    return kernel.join_gradient(dq, q), *(kernel.join_keys(x, length) for x in own), None


_attend.defvjp(_forward, _back)


def _count_bytes(q: jax.Array, k: jax.Array, devices: int) -> tuple[int, int]:
    del q
    sent = (devices - 1) * count_bytes_of_keys(k, devices)
    return sent, sent


GATHER = Kind("gather", _attend, _count_bytes)
