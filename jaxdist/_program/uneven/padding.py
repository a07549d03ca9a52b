"""Values of groups with different shapes, padded to one shape and cut back to their own."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxdist._program.uneven.joined_ops import abstract, dtype_of


def list_shapes(column: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
    """Return the shape of a column in each group; groups without a value get that of another."""
    known = [None if a is None else tuple(jnp.shape(abstract(a))) for a in column]
    some = next(s for s in known if s is not None)
    return tuple(some if s is None else s for s in known)


def slice_to(value: Any, shape: tuple[int, ...]) -> Any:
    """Return the part of `value` at the start of each dim that has this shape."""
    if value.shape == shape:
        return value
    return jax.lax.slice(value, (0,) * len(shape), shape)


def pad_to_largest(value: Any, column: tuple[Any, ...], shapes: tuple[Any, ...]) -> Any:
    """Pad `value` to the largest of `shapes` in each dim; return zeros if the value is None."""
    largest = tuple(map(max, zip(*shapes, strict=True)))
    dtype = next(dtype_of(a) for a in column if a is not None)
    if value is None:
        return jnp.zeros(largest, dtype)
    return pad_to_shape(jnp.asarray(value), largest)


def pad_to_shape(value: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Pad `value` with zeros at the end of each dim."""
    if value.shape == shape:
        return value
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        # JAX traces a pad of random keys, but cannot lower it: pad their data instead.
        words = jax.random.key_data(value)
        whole = pad_to_shape(words, (*shape, *words.shape[value.ndim :]))
        return jax.random.wrap_key_data(whole, impl=jax.random.key_impl(value))
    widths = [(0, n - have, 0) for n, have in zip(shape, value.shape, strict=True)]
    return jax.lax.pad(value, jnp.zeros((), value.dtype), widths)
