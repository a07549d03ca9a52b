"""The kind, shape and layout of each result of a program."""

import dataclasses
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from jaxdist._mesh import ReplicaMesh
from jaxdist._values import Cut, Kind


@dataclasses.dataclass(frozen=True)
class OutSlot:
    """One traced result of a program: its name, its kind, and its shape on one replica."""

    name: str
    kind: Kind
    shape: tuple[int, ...]  # on one replica
    dtype: Any
    cut: Cut | None = None  # of a `Sharded` array
    # For a result with a sharding constraint by the step: how many logical devices split each dim.
    parts: tuple[int, ...] | None = None

    def spec(self, layout: ReplicaMesh) -> PartitionSpec:
        """Return the partitioning over the replica axes."""
        if self.cut is not None:
            return self.cut.spec(layout)
        return layout.replica_spec if self.kind is Kind.PER_REPLICA else PartitionSpec()

    def marked_sharding(self, layout: ReplicaMesh) -> NamedSharding | None:
        """Return the sharding that the step constrained this result to, as far as possible.

        A dim that cannot be split into equal parts stays whole. The rows of each replica stay
        together.
        """
        if self.parts is None or self.kind is Kind.SHARDED:
            return None
        tiles = layout.tiles(self.parts)
        even = [
            entry if size % count == 0 else None
            for entry, size, count in zip(
                _pad_entries(tiles.spec, len(self.parts)), self.shape, self.parts, strict=True
            )
        ]
        if self.kind is Kind.PER_REPLICA:
            even[:1] = [layout.replica_spec[0]]
        return NamedSharding(tiles.mesh, PartitionSpec(*even))

    def remove_extra_dim(self, array: Any) -> Any:
        """Return the global array without the extra dim that each scalar has inside the program."""
        is_scalar = self.kind is not Kind.PER_REPLICA and not self.shape
        return array.reshape(()) if is_scalar else array


def _pad_entries(spec: PartitionSpec, ndim: int) -> list[Any]:
    """Return the entries of a `PartitionSpec`, one for each dim."""
    entries = list(spec)
    return entries + [None] * (ndim - len(entries))
