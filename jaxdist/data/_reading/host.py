"""Host memory that JAX may keep: aligned, and referred to by nobody else."""

from typing import Any

import numpy as np

from jaxdist._values import aligned_empty


def copy_aligned(array: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """A copy in memory of our own, as `dtype`."""
    copy = aligned_empty(array.shape, dtype)
    np.copyto(copy, array, casting="unsafe")
    return copy


def copy_padded(array: np.ndarray, dtype: np.dtype[Any], rows: int) -> np.ndarray:
    """A copy of `rows` rows in memory of our own, as `dtype`; those that are missing are zero."""
    copy = aligned_empty((rows, *array.shape[1:]), dtype)
    copy[array.shape[0] :] = np.zeros((), dtype)
    np.copyto(copy[: array.shape[0]], array, casting="unsafe")
    return copy


def copy_rows(array: np.ndarray, rows: np.ndarray | slice) -> np.ndarray:
    """A copy of some rows, in memory of our own."""
    if isinstance(rows, slice):
        return copy_aligned(array[rows], array.dtype)
    copy = aligned_empty((len(rows), *array.shape[1:]), array.dtype)
    # 'clip' lets NumPy write into `copy` at once; 'raise' goes through a second buffer.
    np.take(array, rows, axis=0, out=copy, mode="clip")
    return copy
