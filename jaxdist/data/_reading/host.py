"""Copies arrays to aligned host memory that no other code refers to, so that JAX may keep it."""

from typing import Any

import numpy as np

from jaxdist._values import allocate_aligned


def copy_aligned(array: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """Return an aligned copy of the array, with `dtype`. See Note [Who owns host memory]."""
    copy = allocate_aligned(array.shape, dtype)
    # `unsafe` allows float64 to become float32, as JAX converts it.
    np.copyto(copy, array, casting="unsafe")
    return copy


def copy_padded(array: np.ndarray, dtype: np.dtype[Any], rows: int) -> np.ndarray:
    """Return an aligned copy with `rows` rows and `dtype`; the added rows are zero."""
    copy = allocate_aligned((rows, *array.shape[1:]), dtype)
    copy[array.shape[0] :] = np.zeros((), dtype)
    np.copyto(copy[: array.shape[0]], array, casting="unsafe")
    return copy


def copy_rows(array: np.ndarray, rows: np.ndarray | slice) -> np.ndarray:
    """Return an aligned copy of some rows."""
    if isinstance(rows, slice):
        return copy_aligned(array[rows], array.dtype)
    copy = allocate_aligned((len(rows), *array.shape[1:]), array.dtype)
    # With 'clip' NumPy writes into `copy` directly; with 'raise' it uses a second buffer.
    np.take(array, rows, axis=0, out=copy, mode="clip")
    return copy
