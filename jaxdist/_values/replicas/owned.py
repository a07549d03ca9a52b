"""Copies of host memory that the caller could still write to."""

from typing import Any, TypeVar

import jax
import numpy as np
from flax import nnx

T = TypeVar("T")

# Note [Who owns host memory]
# On CPU, JAX uses a NumPy buffer without a copy if its address is divisible by 64, whatever
# `may_alias` says (jaxlib, `kImmutableZeroCopy`). On accelerators, the transfer still runs when
# `device_put` or a jitted call returns. In both cases a caller who reuses the NumPy array would
# change a value of jaxdist. So everything that jaxdist keeps, and everything that a step in flight
# reads, is a copy of its own.
_ALIGNMENT_BYTES = 64
# From here on a second copy, by JAX, costs more than it takes to allocate an aligned array.
_LARGE_BYTES = 1 << 18


def allocate_aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """Return an uninitialised array that CPU devices can use without a copy."""
    if dtype.hasobject:
        # Raw bytes are not valid references: Python would crash when it reads or replaces one.
        return np.empty(shape, dtype)
    size_bytes = dtype.itemsize
    for rows in shape:
        size_bytes *= rows
    raw = np.empty(size_bytes + _ALIGNMENT_BYTES, np.uint8)
    # `__array_interface__` takes a third of the time of `.ctypes`.
    start = -raw.__array_interface__["data"][0] % _ALIGNMENT_BYTES
    return np.ndarray(shape, dtype, raw, start)


def copy_if_writable(value: Any) -> Any:
    """Return `value`, or a read-only copy if it is a NumPy array that is not immutable.

    Cost:
        A copy on the host for a writable array; else nothing.
    """
    if not isinstance(value, np.ndarray) or is_immutable(value) or not _is_of_numbers(value):
        return value
    if value.nbytes < _LARGE_BYTES:
        small = np.array(value, order="C")
        small.flags.writeable = False
        return small
    copy = allocate_aligned(value.shape, value.dtype)
    np.copyto(copy, value)
    # The base, too: a view of it with the flag set would be writable.
    for part in (copy, copy.base):
        if isinstance(part, np.ndarray):
            part.flags.writeable = False
    return copy


def copy_writable_leaves(tree: T) -> T:
    """Return `tree` with read-only copies of its NumPy arrays; `tree` itself if it needs none."""
    if not any(isinstance(x, np.ndarray) and not is_immutable(x) for x in jax.tree.leaves(tree)):
        return tree
    # Not through NNX modules: unflattening makes another module, and updates of it would be lost.
    leaves, treedef = jax.tree.flatten(tree, is_leaf=is_updated_in_place)
    return jax.tree.unflatten(treedef, map(copy_if_writable, leaves))


def is_updated_in_place(x: Any) -> bool:
    """Whether `x` is an object that a step updates in place, such as an NNX module."""
    return isinstance(x, nnx.Pytree)


def is_immutable(array: np.ndarray) -> bool:
    """Whether nobody can write to the memory of an array, through it or an array that it views."""
    part: Any = array
    while isinstance(part, np.ndarray):
        if part.flags.writeable:
            return False
        part = part.base
    # Any other owner of the memory, such as an mmap or another library, may still write to it.
    return part is None or isinstance(part, bytes)


def _is_of_numbers(array: np.ndarray) -> bool:
    """Whether JAX accepts an array; it raises for masked arrays, objects, strings and dates."""
    return array.dtype.kind not in "OSUMm" and not isinstance(array, np.ma.MaskedArray)
