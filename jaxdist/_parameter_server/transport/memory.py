"""Memory for arrays, at addresses where JAX takes it as it is."""

import math
from collections.abc import Sequence

import numpy as np

# JAX copies arrays of NumPy that start elsewhere.
ALIGNMENT = 64
# A copy of less than this takes less time than finding aligned memory.
_SMALL = 2**16


def allocate(size: int) -> np.ndarray:
    """Return so many bytes, whose values are arbitrary."""
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size]


def make_empty(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Return an array whose values are arbitrary."""
    size = math.prod(shape) * dtype.itemsize
    return np.empty(shape, dtype) if size < _SMALL else np.ndarray(shape, dtype, allocate(size))
