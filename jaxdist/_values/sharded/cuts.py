"""`Cut`: how one array is divided into pieces over the replicas."""

import math
from typing import NamedTuple

from jax.sharding import PartitionSpec

from jaxdist._mesh import ReplicaMesh


class Cut(NamedTuple):
    """The dim along which an array is cut, its size without padding, and the axes of the pieces."""

    dim: int
    size: int
    axes: tuple[str, ...] | None = None  # some of the replica axes; None means all
    split: int | None = None  # another dim, sharded over the logical axes of each replica

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

    def spec(self, layout: ReplicaMesh) -> PartitionSpec:
        """Return the layout over the replica axes."""
        return PartitionSpec(*[None] * self.dim, self.over(layout))

    def insert_dim(self, dim: int) -> "Cut":
        """Return the cut of the array after a dim was inserted at `dim`, as `vmap` does."""
        split = self.split if self.split is None else self.split + (dim <= self.split)
        return self._replace(dim=self.dim + (dim <= self.dim), split=split)

    def before(self, dim: int) -> "Cut":
        """Return the cut of the array after dim `dim`, which is not cut, was removed."""
        split = self.split if self.split is None else self.split - (dim < self.split)
        return self._replace(dim=self.dim - (dim < self.dim), split=split)

    def full_spec(self, layout: ReplicaMesh) -> PartitionSpec:
        """Return the layout over all axes, the logical ones included."""
        if self.split is None or layout.num_logical == 1:
            return self.spec(layout)
        entries = [*self.spec(layout), *[None] * (self.split - self.dim)]
        entries[self.split] = layout.logical_axes
        return PartitionSpec(*entries)
