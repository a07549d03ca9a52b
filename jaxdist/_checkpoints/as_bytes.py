"""Arrays of dtypes that tensorstore does not have, which are stored as a byte for each element.

The record of a leaf has its real dtype. Which dtypes are stored so is a part of the format of
checkpoints: a list of our own, so that another version of tensorstore reads the same files.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_DTYPES = ("uint2", "uint4", "float8_e4m3")


def is_as_bytes(dtype: Any) -> bool:
    """Whether arrays of this dtype are stored as bytes."""
    return str(dtype) in _DTYPES


def name_stored_dtype(dtype: Any) -> str:
    """Return the dtype in which arrays of a dtype are stored."""
    return "uint8" if is_as_bytes(dtype) else str(dtype)


def view_stored(array: Any) -> Any:
    """Return an array in the dtype in which it is stored, with the same sharding.

    Cost:
        For an array of JAX that is stored as bytes, a copy of its shards through the host.
    """
    return _view(array, np.dtype(np.uint8)) if is_as_bytes(array.dtype) else array


def view_real(stored: Any, dtype: Any) -> Any:
    """Return a stored array in its real dtype; the inverse of `view_stored`."""
    return _view(stored, np.dtype(dtype)) if is_as_bytes(dtype) else stored


def _view(array: Any, dtype: np.dtype[Any]) -> Any:
    if not isinstance(array, jax.Array):
        return array.view(dtype)
    # NumPy has a byte for each element of less than a byte, and JAX may pack them.
    own = {str(shard.index): shard for shard in array.addressable_shards}
    values = {index: np.asarray(shard.data).view(dtype) for index, shard in own.items()}
    return jax.make_array_from_callback(
        array.shape, array.sharding, lambda index: values[str(index)], dtype=dtype
    )


def clear_unused_bits(array: np.ndarray) -> np.ndarray:
    """Return an array of NumPy with zeros in the bits that its dtype does not use.

    `np.uint8(0xF1).view("int4")` is 1, as is 0x01: JAX keeps only the four bits that count, and
    the checksum of a restored array would differ.
    """
    dtype = array.dtype
    if dtype.kind != "V":
        return array
    info = jnp.iinfo if jnp.issubdtype(dtype, np.integer) else jnp.finfo
    bits = info(dtype).bits
    if bits >= 8:
        return array
    return np.asarray(array.view(np.uint8) & ((1 << bits) - 1)).view(dtype)
