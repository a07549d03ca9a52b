"""Arrays that CPU devices use without a copy, so that a missing copy of jaxdist is seen."""

import math

import numpy as np

# XLA's, for CPU devices.
_ALIGNMENT_BYTES = 64


def allocate_aligned(shape: tuple[int, ...]) -> np.ndarray:
    """Return a writable array of float32 whose address is aligned as JAX needs it to be."""
    raw = np.empty(4 * math.prod(shape) + _ALIGNMENT_BYTES, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT_BYTES
    return np.ndarray(shape, np.float32, raw, start)
