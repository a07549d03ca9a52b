"""How one array is cut into pieces over the replicas."""

import math
from typing import NamedTuple

from jax.sharding import PartitionSpec

from jaxdist._mesh import ReplicaMesh


class Cut(NamedTuple):
    """Along which dim an array is cut, how long that dim is without padding, and over what."""

    dim: int
    size: int
    axes: tuple[str, ...] | None = None  # of the replica axes; None is all of them
    split: int | None = None  # another dim, which lies over the logical axes of each replica

    def over(self, layout: ReplicaMesh) -> tuple[str, ...]:
        """The replica axes over which the pieces lie."""
        return layout.replica_axes if self.axes is None else self.axes

    def pieces(self, layout: ReplicaMesh) -> int:
        """How many pieces there are."""
        if self.axes is None:
            return layout.num_replicas
        return math.prod(layout.mesh.shape[a] for a in self.axes)

    def rows(self, pieces: int) -> int:
        """Length of one piece: the last pieces are padded to it."""
        return math.ceil(self.size / pieces)

    def padding(self, pieces: int) -> int:
        """How much longer the cut dim is with padding."""
        return self.rows(pieces) * pieces - self.size

    def local_shape(self, shape: tuple[int, ...], pieces: int) -> tuple[int, ...]:
        """The shape of one piece, from any shape that is right in the other dims."""
        return (*shape[: self.dim], self.rows(pieces), *shape[self.dim + 1 :])

    def spec(self, layout: ReplicaMesh) -> PartitionSpec:
        """The layout over the replica axes."""
        axes = self.over(layout)
        return PartitionSpec(*[None] * self.dim, axes[0] if len(axes) == 1 else axes)

    def behind(self, dim: int) -> "Cut":
        """The cut of an array that has one more dim, `dim`."""
        split = self.split if self.split is None else self.split + (dim <= self.split)
        return self._replace(dim=self.dim + (dim <= self.dim), split=split)

    def before(self, dim: int) -> "Cut":
        """The cut of what stands at one place of dim `dim`, which is not cut."""
        split = self.split if self.split is None else self.split - (dim < self.split)
        return self._replace(dim=self.dim - (dim < self.dim), split=split)

    def full_spec(self, layout: ReplicaMesh) -> PartitionSpec:
        """The layout over all axes."""
        if self.split is None or layout.num_logical == 1:
            return self.spec(layout)
        entries = [*self.spec(layout), *[None] * (self.split - self.dim)]
        logical = layout.logical_axes
        entries[self.split] = logical[0] if len(logical) == 1 else logical
        return PartitionSpec(*entries)
