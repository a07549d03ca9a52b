"""Host memory that the library keeps: nobody else can write to it.

# Note [Who owns host memory]
On CPU, JAX takes over a NumPy buffer that starts at an address divisible by 64 instead of copying
it, whatever `may_alias` says (jaxlib, `kImmutableZeroCopy`); on accelerators the transfer goes on
after `device_put` and a jitted call return. So a caller who reuses an array would change what was
made of it. What the library keeps, and what a step in flight reads, is a copy of its own.
"""

from typing import Any, TypeVar

import jax
import numpy as np
from flax import nnx

T = TypeVar("T")

_ALIGNMENT_BYTES = 64


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """An uninitialised array that CPU devices can take over without a copy."""
    if dtype.hasobject:
        # Raw bytes are no references to objects: to read or replace them ends the process.
        return np.empty(shape, dtype)
    size_bytes = dtype.itemsize
    for rows in shape:
        size_bytes *= rows
    raw = np.empty(size_bytes + _ALIGNMENT_BYTES, np.uint8)
    # `__array_interface__` costs a third of `.ctypes`.
    start = -raw.__array_interface__["data"][0] % _ALIGNMENT_BYTES
    return np.ndarray(shape, dtype, raw, start)


def owned(value: Any) -> Any:
    """`value`, or a copy that nobody can write to where it is a NumPy array that somebody can.

    Cost:
        A copy on the host of an array that can be written to; else nothing.
    """
    if not isinstance(value, np.ndarray) or is_immutable(value) or not _is_of_numbers(value):
        return value
    copy = aligned_empty(value.shape, value.dtype)
    np.copyto(copy, value)
    for part in (copy, copy.base):
        if isinstance(part, np.ndarray):
            part.flags.writeable = False
    return copy


def owned_leaves(tree: T) -> T:
    """A pytree whose NumPy arrays are `owned`; the pytree itself where there are none."""
    if not any(isinstance(x, np.ndarray) for x in jax.tree.leaves(tree)):
        return tree
    leaves, treedef = jax.tree.flatten(tree, is_leaf=is_updated_in_place)
    copied: T = jax.tree.unflatten(treedef, map(owned, leaves))
    return copied


def is_updated_in_place(x: Any) -> bool:
    """Whether a step updates an object among its arguments: another one like it would be lost."""
    return isinstance(x, nnx.Pytree)


def is_immutable(array: np.ndarray) -> bool:
    """Whether nobody can write to the memory of an array: neither itself nor what it views."""
    part: Any = array
    while isinstance(part, np.ndarray):
        if part.flags.writeable:
            return False
        part = part.base
    return part is None or isinstance(part, bytes)


def _is_of_numbers(array: np.ndarray) -> bool:
    """Whether JAX takes an array as it is; it refuses masked ones, objects and text by name."""
    return array.dtype.kind not in "OSUMm" and not isinstance(array, np.ma.MaskedArray)
