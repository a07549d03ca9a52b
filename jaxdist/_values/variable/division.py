"""Divides some rows of a variable, and leaves the bits of the other rows as they are."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def divide_rows(before: jax.Array, places: tuple[Any, ...], divisors: Any) -> jax.Array:
    """Return an array with some of its rows divided.

    `before.at[places].divide` divides the whole array by products of the divisors. This rounds
    other rows (integers become floats, complex infinities nan, subnormal numbers 0), and a product
    may overflow although no quotient does.

    Shapes:
        In: `before` `[...]`; one array `[n]` of indices for each of its first dims; `divisors`
        `[n, ...]` with the other dims. Out: as `before`.

    Args:
        before: The array.
        places: The indices. Rows that the array does not have are left out.
        divisors: The divisors, in the dtype of the array. Those of a repeated index divide one
            after the other. A quotient of integers is cut off towards zero.
    """
    count = divisors.shape[0]
    if not count or not before.size:
        return before
    # Inside the loop an index is traced, which arrays of NumPy do not take.
    places, divisors = tuple(jnp.asarray(p) for p in places), jnp.asarray(divisors)

    def divide_at(array: jax.Array, rows: tuple[Any, ...], by: Any) -> jax.Array:
        own = array.at[rows].get(mode="fill", fill_value=0, wrap_negative_indices=False)
        return array.at[rows].set(_divide(own, by), mode="drop", wrap_negative_indices=False)

    def divide_one(k: Any, array: jax.Array) -> jax.Array:
        return divide_at(array, tuple(p[k] for p in places), divisors[k])

    times = jnp.zeros(before.shape[: len(places)], jnp.int32)
    times = times.at[places].add(1, mode="drop", wrap_negative_indices=False)
    return jax.lax.cond(
        jnp.any(times > 1),
        lambda: jax.lax.fori_loop(0, count, divide_one, before),
        lambda: divide_at(before, places, divisors),
    )


def _divide(array: jax.Array, by: Any) -> jax.Array:
    if not jnp.issubdtype(array.dtype, np.integer):
        return (array / by).astype(array.dtype)
    # As in floats, where the infinite quotient is cast: the largest or smallest integer, or 0.
    bounds = jnp.iinfo(array.dtype)
    most, least = (jnp.full_like(array, limit) for limit in (bounds.max, bounds.min))
    of_zero = jnp.where(array > 0, most, jnp.where(array < 0, least, array))
    quotient = jax.lax.div(array, jnp.where(by == 0, jnp.ones_like(by), by))
    return jnp.where(by == 0, of_zero, quotient)
