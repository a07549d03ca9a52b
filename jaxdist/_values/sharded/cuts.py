"""`Cut`: how one array is divided into pieces over the replicas."""

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from jax.sharding import PartitionSpec

from jaxdist._mesh import ReplicaMesh

Splits: TypeAlias = tuple[tuple[int, str], ...]


class Cut(NamedTuple):
    """The dim along which an array is cut, its size without padding, and the axes of the pieces.

    `split` says which other dims are sharded over the logical devices of each replica: one dim over
    all of their axes, or pairs of a dim and the name of an axis.
    """

    dim: int
    size: int
    axes: tuple[str, ...] | None = None  # some of the replica axes; None means all
    split: int | Splits | None = None

    def over(self, layout: ReplicaMesh) -> tuple[str, ...]:
        """Return the replica axes over which the pieces are distributed."""
        return layout.replica_axes if self.axes is None else self.axes

    def pieces(self, layout: ReplicaMesh) -> int:
        """Return the number of pieces."""
        if self.axes is None:
            return layout.num_replicas
        return math.prod(layout.mesh.shape[a] for a in self.axes)

    def rows(self, pieces: int) -> int:
        """Return the length of one piece, with padding."""
        # All pieces have the same shape, since one program runs on all replicas.
        return math.ceil(self.size / pieces)

    def padding(self, pieces: int) -> int:
        """Return the number of padding elements along the cut dim."""
        return self.rows(pieces) * pieces - self.size

    def local_shape(self, shape: tuple[int, ...], pieces: int) -> tuple[int, ...]:
        """Return the shape of one piece; `shape` only has to be right in the other dims."""
        return (*shape[: self.dim], self.rows(pieces), *shape[self.dim + 1 :])

    def is_whole(self, shape: tuple[int, ...]) -> bool:
        """Whether an array of this shape has all elements of the cut dim."""
        return shape[self.dim : self.dim + 1] == (self.size,)

    def spec(self, layout: ReplicaMesh) -> PartitionSpec:
        """Return the layout over the replica axes."""
        return PartitionSpec(*[None] * self.dim, self.over(layout))

    @property
    def splits(self) -> tuple[tuple[int, str | None], ...]:
        """The dims that are split, each with the name of its axis; None means all of them."""
        if isinstance(self.split, int):
            return ((self.split, None),)
        return self.split or ()

    def without_splits(self) -> "Cut":
        """Return how the replicas cut the array, whatever the devices of each of them do."""
        return self._replace(split=None)

    def insert_dim(self, dim: int) -> "Cut":
        """Return the cut of the array after a dim was inserted at `dim`, as `vmap` does."""
        split = move_splits(self.split, lambda d: d + (dim <= d))
        return self._replace(dim=self.dim + (dim <= self.dim), split=split)

    def before(self, dim: int) -> "Cut":
        """Return the cut of the array after dim `dim`, which is not cut, was removed."""
        split = move_splits(self.split, lambda d: None if d == dim else d - (dim < d))
        return self._replace(dim=self.dim - (dim < self.dim), split=split)

    def split_index(self, index: Any) -> tuple[tuple[Any, ...], tuple[Any, ...], "Cut"]:
        """Split an index into the part of the dims before those that are cut, and the rest.

        The first part has numbers and slices that the trace knows. It is empty where an entry is
        an array: NumPy has other rules for numbers beside arrays.

        Returns:
            The first part, the rest for the array that it gives, and the cut of that array.
        """
        entries = index if isinstance(index, tuple) else (index,)
        if not all(e is None or e is Ellipsis or _is_static(e) for e in entries):
            return (), entries, self
        lead = tuple(itertools.takewhile(_is_static, entries[: self.dim]))
        cut, kept = self, sum(isinstance(e, slice) for e in lead)
        for _ in range(len(lead) - kept):
            cut = cut.before(0)
        return lead, (*[slice(None)] * kept, *entries[len(lead) :]), cut

    def full_spec(self, layout: ReplicaMesh) -> PartitionSpec:
        """Return the layout over all axes, the logical ones included."""
        if layout.num_logical == 1 or not self.splits:
            return self.spec(layout)
        entries = {self.dim: self.over(layout), **find_split_entries(self, layout)}
        return PartitionSpec(*(entries.get(d) for d in range(max(entries) + 1)))


def move_splits(
    split: int | Splits | None, move: Callable[[int], int | None]
) -> int | Splits | None:
    """Return the splits after their dims were moved; `move` returns None for a dim that is gone."""
    if split is None or isinstance(split, int):
        return None if split is None else move(split)
    moved = ((move(dim), axis) for dim, axis in split)
    return tuple((dim, axis) for dim, axis in moved if dim is not None) or None


def find_split_entries(cut: Cut, layout: ReplicaMesh) -> dict[int, tuple[str, ...]]:
    """Return the entries of a `PartitionSpec` for the dims that are split, by dim."""
    entries: dict[int, tuple[str, ...]] = {}
    for dim, axis in cut.splits:
        names = layout.logical_axes if axis is None else (axis,)
        entries[dim] = (*entries.get(dim, ()), *names)
    return entries


def _is_static(entry: Any) -> bool:
    """Whether an entry of an index is a number, or a slice of numbers."""
    if isinstance(entry, slice):
        parts = (entry.start, entry.stop, entry.step)
        return all(p is None or _is_static(p) for p in parts)
    return isinstance(entry, (int, np.integer)) and not isinstance(entry, bool)
