"""What is known of a result of a step before it runs."""

import dataclasses
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from jaxdist._mesh import ReplicaMesh
from jaxdist._values import Cut, Kind


@dataclasses.dataclass(frozen=True)
class OutSlot:
    """One traced result: its name, its kind, and its local shape."""

    name: str
    kind: Kind
    shape: tuple[int, ...]  # local
    dtype: Any
    cut: Cut | None = None  # of one array in pieces
    # Of one that the step marked: the parts of each dim over the logical devices.
    parts: tuple[int, ...] | None = None

    def spec(self, layout: ReplicaMesh) -> PartitionSpec:
        """Its layout over the replica axes."""
        if self.cut is not None:
            return self.cut.spec(layout)
        return layout.replica_spec if self.kind is Kind.PER_REPLICA else PartitionSpec()

    def marked(self, layout: ReplicaMesh) -> NamedSharding | None:
        """The layout that the step marked it with, as far as an array can have it.

        Dims that do not go into equal parts are whole, and the rows of each replica are together.
        """
        if self.parts is None or self.kind is Kind.SHARDED:
            return None
        tiles = layout.tiles(self.parts)
        even = [
            entry if size % count == 0 else None
            for entry, size, count in zip(
                _padded(tiles.spec, len(self.parts)), self.shape, self.parts, strict=True
            )
        ]
        if self.kind is Kind.PER_REPLICA:
            even[:1] = [layout.replica_spec[0]]
        return NamedSharding(tiles.mesh, PartitionSpec(*even))

    def settle(self, array: Any) -> Any:
        """The global array without the dim that every scalar has inside."""
        is_scalar = self.kind is not Kind.PER_REPLICA and not self.shape
        return array.reshape(()) if is_scalar else array


def _padded(spec: PartitionSpec, ndim: int) -> list[Any]:
    """The entries of a layout, one for each dim."""
    entries = list(spec)
    return entries + [None] * (ndim - len(entries))
