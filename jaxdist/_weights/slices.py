"""Reads a slice of an array of a file: which bytes, and how many at once."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import jax.numpy as jnp
import numpy as np

from jaxdist._buckets import BucketPath
from jaxdist._values import allocate_aligned
from jaxdist._weights.files import Stored, read_ranges
from jaxdist._weights.leaves import ModelWeight
from jaxdist._weights.weight import Weight, apply, make_unread
from jaxdist.errors import CheckpointError

Index: TypeAlias = tuple[slice, ...]

# Reading so many bytes too many takes less time than one more read.
_GAP_IN_FILE = 1 << 14
_GAP_IN_BUCKET = 1 << 20
_BLOCK = 1 << 24  # bytes of a file in memory at once


@dataclasses.dataclass(frozen=True)
class Region:
    """A view of bytes of a file, as in Note [Views without memory] in `weight.py`.

    Attributes:
        stored: The array of the file.
        start: The first byte of the view, counted from the start of the file.
        shape: The shape of the view.
        strides: Its strides in bytes, none negative.
    """

    stored: Stored
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def take(self, index: Index) -> "Region":
        """Return a part. Slices have a step of 1, and ends within the shape."""
        start = sum(i.start * stride for i, stride in zip(index, self.strides, strict=True))
        shape = tuple(i.stop - i.start for i in index)
        return dataclasses.replace(self, start=self.start + start, shape=shape)

    def read(self) -> np.ndarray:
        """Return the elements, in an array of this region's shape."""
        dtype = self.stored.dtype
        if 0 in self.shape:
            return np.empty(self.shape, dtype)
        plan = self._plan()
        # Largest strides first; the outer dims are those of separate reads.
        shape = [self.shape[d] for d in plan.order]
        strides = [self.strides[d] for d in plan.order]
        outer = plan.outer
        starts = [
            self.start + sum(i * s for i, s in zip(index, strides, strict=False))
            for index in np.ndindex(*shape[:outer])
        ]
        ranges = [(start, plan.span) for start in starts]
        with read_ranges(self.stored.file, ranges) as blocks:
            if outer == 0:
                return np.transpose(
                    _view(next(blocks), dtype, shape, strides), np.argsort(plan.order)
                )
            found = np.empty(shape, dtype)
            for index, block in zip(np.ndindex(*shape[:outer]), blocks, strict=True):
                found[index] = _view(block, dtype, shape[outer:], strides[outer:])
        return np.transpose(found, np.argsort(plan.order))

    def _plan(self) -> "_Plan":
        order = sorted(range(len(self.shape)), key=lambda d: -self.strides[d])
        counts = [self.shape[d] for d in order]
        steps = [self.strides[d] for d in order]
        in_bucket = isinstance(self.stored.file, BucketPath)
        gap = _GAP_IN_BUCKET if in_bucket else _GAP_IN_FILE

        def make(outer: int) -> _Plan:
            inner = zip(counts[outer:], steps[outer:], strict=True)
            span = sum((n - 1) * s for n, s in inner) + self.stored.dtype.itemsize
            return _Plan(order, outer, span, math.prod(counts[:outer]) * (span + gap))

        return min((make(outer) for outer in range(len(order) + 1)), key=lambda plan: plan.cost)

    def split(self) -> "Iterator[tuple[Index, Region]]":
        """Yield parts of a limited size, so that not all of it is in memory twice."""
        size = math.prod(self.shape) * self.stored.dtype.itemsize
        long = [d for d, n in enumerate(self.shape) if n > 1]
        whole = tuple(slice(0, n) for n in self.shape)
        if size <= _BLOCK or not long:
            yield whole, self
            return
        dim = max(long, key=lambda d: self.strides[d])
        count = min(self.shape[dim], -(-size // _BLOCK))
        ends = np.linspace(0, self.shape[dim], count + 1).astype(int).tolist()
        for start, stop in itertools.pairwise(ends):
            index = (*whole[:dim], slice(start, stop), *whole[dim + 1 :])
            yield index, self.take(index)

    @property
    def cost(self) -> int:
        """The bytes that `read` reads, and as many for each read as it is worth."""
        return 0 if 0 in self.shape else self._plan().cost


@dataclasses.dataclass(frozen=True)
class _Plan:
    order: list[int]
    outer: int  # how many dims, in this order, are separate reads
    span: int  # the bytes of a read
    cost: int


def _view(
    block: np.ndarray, dtype: np.dtype, shape: Sequence[int], strides: Sequence[int]
) -> np.ndarray:
    return np.ndarray(shape, dtype, block, strides=strides)


@dataclasses.dataclass(frozen=True)
class Copied:
    """A weight with a reshape that has to copy, so the whole array of the file is read."""

    stored: Stored
    weight: Weight
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Parts:
    """What an array of a model is made of: one part, or one for each row along a new dim 0."""

    parts: Sequence[Region | Copied]
    is_stacked: bool

    def count_elements(self, weight: ModelWeight) -> int:
        """Return how many elements are in memory while an array of a model is read."""
        copied = [x.stored.shape for x in self.parts if isinstance(x, Copied)]
        return max(map(math.prod, [weight.shape, *copied]))


def find_part(stored: Stored, weight: Weight) -> Region | Copied:
    """Return where the elements of a weight are.

    Raises:
        ValueError: The shape of the array does not allow a change of the weight.
        IndexError: The same, for an index.
    """
    unread = make_unread(stored.shape, stored.dtype)
    try:
        found = apply(weight, unread)
    except ValueError:
        zeros = np.broadcast_to(np.zeros((), stored.dtype), stored.shape)
        return Copied(stored, weight, apply(weight, zeros, copy=None).shape)
    first = [x.__array_interface__["data"][0] for x in (found, unread)]
    start = 0 if 0 in found.shape else first[0] - first[1]
    return Region(stored, stored.start + start, found.shape, found.strides)


def read_slices(
    weight: ModelWeight, parts: Parts, indices: Sequence[Index]
) -> Iterator[np.ndarray]:
    """Yield slices of an array of a model, in its dtype; its padding is zero.

    Raises:
        CheckpointError: An element does not fit into the dtype.
    """
    # What is beyond the shape is padding.
    real = [
        tuple(
            slice(min(i.start, n), min(i.stop, n)) for i, n in zip(index, weight.shape, strict=True)
        )
        for index in indices
    ]
    readers: list[tuple[int | None, _Reader]] = []
    for row, part in enumerate(parts.parts):
        if not parts.is_stacked:
            readers.append((None, _open(weight, part, real)))
        elif own := [index[1:] for index in real if index[0].start <= row < index[0].stop]:
            readers.append((row, _open(weight, part, own)))
    for index, inner in zip(indices, real, strict=True):
        made = allocate_aligned(tuple(i.stop - i.start for i in index), weight.dtype)
        made[...] = np.zeros((), weight.dtype)
        target = made[(*(slice(0, i.stop - i.start) for i in inner), ...)]
        for row, read in readers:
            if row is None:
                read(target, inner)
            elif inner[0].start <= row < inner[0].stop:
                read(target[row - inner[0].start, ...], inner[1:])
        yield made


_Reader: TypeAlias = Callable[[np.ndarray, Index], None]


def _open(weight: ModelWeight, part: Region | Copied, indices: Sequence[Index]) -> _Reader:
    """Return a function that reads one of the slices into an array."""
    indices = [index for index in indices if all(i.stop > i.start for i in index)]
    if not indices:
        return lambda target, index: None
    box = tuple(
        slice(min(i.start for i in along), max(i.stop for i in along))
        for along in zip(*indices, strict=True)
    )
    if isinstance(part, Copied):
        values = apply(part.weight, _read_whole(part.stored), copy=None)[(*box, ...)].copy()
    elif part.take(box).cost >= sum(part.take(index).cost for index in indices):
        region = part

        def read(target: np.ndarray, index: Index) -> None:
            for inner, block in region.take(index).split():
                convert(weight.path, target[(*inner, ...)], block.read())

        return read
    else:
        # They lie between each other, so they are read together.
        values = np.empty(part.take(box).shape, part.stored.dtype)
        for inner, block in part.take(box).split():
            values[inner] = block.read()

    def copy(target: np.ndarray, index: Index) -> None:
        pairs = zip(index, box, strict=True)
        own = tuple(slice(i.start - b.start, i.stop - b.start) for i, b in pairs)
        if target.size:
            convert(weight.path, target, values[(*own, ...)])

    return copy


def _read_whole(stored: Stored) -> np.ndarray:
    strides = make_unread(stored.shape, stored.dtype).strides
    return Region(stored, stored.start, stored.shape, strides).read()


def convert(path: str, target: np.ndarray, values: np.ndarray) -> None:
    """Copy values into an array of another dtype of the same kind.

    Raises:
        CheckpointError: The other dtype has no number near a value.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        target[...] = values
    if target.dtype == values.dtype:
        return
    if jnp.issubdtype(target.dtype, jnp.floating):
        is_narrower = jnp.finfo(target.dtype).max < jnp.finfo(values.dtype).max
        lost = np.isfinite(values) & ~np.isfinite(target) if is_narrower else np.zeros((), bool)
    elif jnp.issubdtype(target.dtype, jnp.integer):
        lost = target != values
    else:
        lost = np.zeros((), bool)
    if lost.any():
        raise CheckpointError(
            f"{path} cannot be converted from {values.dtype} to {target.dtype}: "
            f"{values[lost][0]} would be {target[lost][0]}.\n\n"
            "Weights are rounded to the dtype of what they are copied into, which has to have "
            "numbers of their size.\n\n"
            f"Use {values.dtype} there."
        )
