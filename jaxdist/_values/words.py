"""Numbers as unsigned integers of the same bits, and integers in a dtype that has room for counts.

A copy over the replicas is a sum in which the others have 0. As floats it would lose bits: -0.0
plus 0 is 0, and XLA on CPU computes subnormal numbers as 0. A sum of integers loses none.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def to_words(array: Any) -> jax.Array:
    """Return the bits of an array as integers, whose sum with zeros has the same bits.

    Shapes:
        In: `[...]`. Out: `[...]`; of complex numbers `[..., 2]`.
    """
    dtype = array.dtype
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return to_words(jnp.stack([array.real, array.imag], axis=-1))
    if jnp.issubdtype(dtype, jnp.floating):
        array = jax.lax.bitcast_convert_type(array, f"uint{jnp.finfo(dtype).bits}")
    # No backend sums booleans or numbers of less than a byte.
    is_narrow = dtype == np.bool_ or jnp.iinfo(array.dtype).bits < 8
    return array.astype(jnp.int32) if is_narrow else array


def from_words(words: jax.Array, dtype: Any) -> jax.Array:
    """Return the array whose bits `to_words` returned."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        parts = from_words(words, np.empty(0, dtype).real.dtype)
        return jax.lax.complex(parts[..., 0], parts[..., 1])
    if jnp.issubdtype(dtype, jnp.floating):
        return jax.lax.bitcast_convert_type(words.astype(f"uint{jnp.finfo(dtype).bits}"), dtype)
    return words.astype(dtype)


def widen_integers(array: Any) -> Any:
    """Return integers with 32 bits or more, so that numbers of rows and replicas fit beside."""
    return array if array.dtype.itemsize >= 4 else array.astype(np.int32)
