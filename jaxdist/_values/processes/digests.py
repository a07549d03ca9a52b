"""Short strings that tell whether values of several processes are equal."""

import hashlib
from typing import Any

import jax
import numpy as np

# Of a larger array, every n-th row of bytes is read: enough to find accidental differences.
MOST_BYTES = 4 * 2**20


def is_of_this_process(value: Any) -> bool:
    """Whether a value is whole in this process: a number, an array of NumPy, or a local array."""
    if isinstance(value, jax.Array):
        return not isinstance(value, jax.core.Tracer) and value.is_fully_addressable
    return isinstance(value, (np.ndarray, np.generic, bool, int, float, complex))


def digest(value: Any, most_bytes: int | None = None) -> str:
    """Return a string that is equal for values with the same dtype, shape and bits.

    Cost:
        A copy from the device, and about 1 ms for each MiB.

    Args:
        value: A value of this process.
        most_bytes: Of a larger value, only this many bytes are read, evenly distributed.
    """
    if isinstance(value, jax.Array) and not isinstance(value.dtype, np.dtype):
        value = jax.random.key_data(value)
    array = np.asarray(value)
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8) if array.size else array
    if most_bytes is not None and data.nbytes > most_bytes:
        step = -(-data.nbytes // most_bytes)
        data = data[::step].copy()
    made = hashlib.blake2b(data.tobytes(), digest_size=12)
    made.update(f"{array.dtype}{array.shape}".encode())
    return made.hexdigest()
