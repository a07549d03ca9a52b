"""Dtypes that a message can hold, by name."""

import functools

import ml_dtypes
import numpy as np

from jaxdist._validate import show
from jaxdist.errors import ArgumentTypeError

_OF_NUMPY = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)


@functools.cache
def get_dtypes() -> dict[str, np.dtype]:
    """Return the dtypes of numbers that have the same bytes on every machine, by name."""
    found = {name: np.dtype(name) for name in _OF_NUMPY}
    for name in dir(ml_dtypes):
        kind = getattr(ml_dtypes, name)
        if isinstance(kind, type) and issubclass(kind, np.generic):
            found[name] = np.dtype(kind)
    return found


@functools.cache
def get_names() -> dict[np.dtype, str]:
    """Return the names of these dtypes. A dtype of the other byte order is none of them."""
    return {dtype: name for name, dtype in get_dtypes().items()}


def get_plain(caller: str, array: np.ndarray) -> np.ndarray:
    """Return an array as a message holds it: contiguous, and little-endian.

    Raises:
        ArgumentTypeError: It is no NumPy array, or its dtype is none of `get_dtypes`.
    """
    # Of a hundred small arrays, the names of their dtypes would take the most time.
    if type(array) is np.ndarray and array.dtype in get_names() and array.flags.c_contiguous:
        return array
    if not isinstance(array, np.ndarray):
        raise ArgumentTypeError(
            f"{caller} was given a message with the array {show(array)}.\n\n"
            "Arrays of a message are NumPy arrays.\n\nPass np.asarray(value)."
        )
    native = array.dtype.newbyteorder("=")
    if native not in get_names():
        raise ArgumentTypeError(
            f"{caller} was given a message with an array of dtype {array.dtype}.\n\n"
            "A message holds numbers whose bytes mean the same on every machine: bool, integers, "
            "floats up to 64 bits, complex numbers of two of those, and the dtypes of ml_dtypes."
            "\n\nConvert it, for instance by array.astype('float32')."
        )
    # Also a subclass, such as a matrix, becomes a plain array. A 0-d array stays one.
    return np.asarray(array, dtype=native, order="C")
