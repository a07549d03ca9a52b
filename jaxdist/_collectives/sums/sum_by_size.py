"""The sum of many leaves by algorithms that depend on the size of a leaf."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from jaxdist._collectives.algorithms import InShards, ReplicaGroups
from jaxdist._collectives.marks.after import order_after
from jaxdist._collectives.sums.packing import Alone, Packing


@dataclasses.dataclass(frozen=True)
class Entry:
    """The algorithm for leaves of up to `limit` bytes; -1 means no limit."""

    algorithm: InShards
    limit: int

    def can_take(self, leaf: Any) -> bool:
        """Whether a leaf is small enough."""
        return self.limit < 0 or leaf.size * leaf.dtype.itemsize <= self.limit


@dataclasses.dataclass(frozen=True)
class SumBySize:
    """A sum that gives each leaf to the first entry that takes it.

    The leaves of each entry are packed and summed. The results have the order of the leaves.
    """

    level: ReplicaGroups
    entries: tuple[Entry, ...]
    packing: Packing = dataclasses.field(default_factory=Alone)
    apart: bool = False  # each vector waits for the one before, or XLA would combine them

    def __call__(self, arrays: list[jax.Array]) -> Sequence[jax.Array]:
        """Return the sums, on every replica."""
        results: list[Any] = list(arrays)
        left = list(range(len(arrays)))
        for entry in self.entries:
            mine = [i for i in left if entry.can_take(arrays[i])]
            left = [i for i in left if i not in set(mine)]
            packed = self.packing.pack([arrays[i] for i in mine])
            sums: list[jax.Array] = []
            for vector in packed.vectors:
                # See Note [Collectives that stay apart].
                own = order_after(sums[-1:], [vector])[0] if self.apart and sums else vector
                sums.append(entry.algorithm.all_reduce(own, self.level))
            for i, total in zip(mine, packed.unpack(sums), strict=True):
                results[i] = total
        return results
