"""Where the arrays of a message are in its stream of bytes, and in the memory of the receiver."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from jaxdist._parameter_server.transport.message import get_dtypes

# Arrays start at multiples of this, so that JAX can use their memory.
ALIGNMENT = 64
# A copy of less than this takes less time than finding aligned memory.
_SMALL = 2**16
# A smaller array shares its memory with its neighbours: one allocation for each would cost more
# than it saves. A larger one has its own, which is freed when that array is no longer used.
_OWN_MEMORY = 2**18
_MOST_DIMS = 32
_NOTHING = np.empty(0, np.uint8)
_NOTHING.flags.writeable = False

Spec = tuple[str, list[int]]


class LayoutError(ValueError):
    """Raised for dtypes and shapes that no message can have."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """The arrays of a message.

    Args:
        specs: Name of the dtype and shape of each array.
        sizes: The bytes of each array.
    """

    specs: Sequence[Spec]
    sizes: Sequence[int]

    @property
    def nbytes(self) -> int:
        """The bytes of the stream: each array ends at a multiple of `ALIGNMENT`."""
        return sum(map(pad, self.sizes))

    def allocate(self) -> "Arrays":
        """Return memory for the arrays."""
        blocks: list[int] = []
        places: list[tuple[int, int]] = []
        at = 0
        for size in self.sizes:
            if size >= _OWN_MEMORY:
                # The block of small arrays before it ends here.
                blocks += [at] if at else []
                places.append((len(blocks), 0))
                blocks.append(pad(size))
                at = 0
            else:
                places.append((len(blocks), at))
                at += pad(size)
        blocks += [at] if at else []
        return Arrays(self, [_allocate(size) for size in blocks], places)


@dataclasses.dataclass(frozen=True)
class Arrays:
    """Memory for the arrays of a message.

    Args:
        layout: Their dtypes and shapes.
        blocks: Pieces of memory, in the order of the stream.
        places: The number of the block of each array, and where it begins there.
    """

    layout: Layout
    blocks: Sequence[np.ndarray]
    places: Sequence[tuple[int, int]]

    def view(self) -> tuple[np.ndarray, ...]:
        """Return the arrays, which cannot be written.

        Raises:
            LayoutError: The bytes are not values of their dtype.
        """
        dtypes = get_dtypes()
        for block in self.blocks:
            block.flags.writeable = False
        found = []
        for (name, shape), size, (number, at) in zip(
            self.layout.specs, self.layout.sizes, self.places, strict=True
        ):
            # Arrays without bytes at the end have no block.
            block = self.blocks[number] if size else _NOTHING
            if name == "bool" and size and block[at : at + size].max() > 1:
                raise LayoutError("a bool is neither 0 nor 1")
            found.append(np.ndarray(shape, dtypes[name], block, at if size else 0))
        return tuple(found)


def make_layout(specs: Sequence[Spec]) -> Layout:
    """Compute the bytes of arrays, without memory for them.

    Raises:
        LayoutError: A dtype is unknown, or a shape is not valid.
    """
    dtypes = get_dtypes()
    sizes = []
    for name, shape in specs:
        dtype = dtypes.get(name)
        if dtype is None:
            raise LayoutError(f"dtype {name[:40]!r} is unknown")
        if len(shape) > _MOST_DIMS or (shape and min(shape) < 0):
            raise LayoutError(f"no array has the shape {str(shape)[:80]}")
        size = math.prod(shape) * dtype.itemsize
        # NumPy refuses arrays that would be too large without their dimensions of length 0.
        largest = size or math.prod(max(length, 1) for length in shape) * dtype.itemsize
        if largest >= 2**62:
            raise LayoutError(f"no array has the shape {str(shape)[:80]}")
        sizes.append(size)
    return Layout(specs, sizes)


def pad(size: int) -> int:
    """Return the bytes that an array of `size` bytes has in the stream."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def make_empty(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Return an array whose values are arbitrary, and that JAX takes without a copy if large."""
    size = math.prod(shape) * dtype.itemsize
    return np.empty(shape, dtype) if size < _SMALL else np.ndarray(shape, dtype, _allocate(size))


def _allocate(size: int) -> np.ndarray:
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size]
