"""The sum of many leaves by algorithms that depend on the size of a leaf."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxdist._collectives.algorithms import Algorithm, ReplicaGroups
from jaxdist._collectives.marks.after import order_after
from jaxdist._collectives.sums.packing import Alone, Packing


@dataclasses.dataclass(frozen=True)
class Entry:
    """The algorithm for leaves of up to `limit` bytes; -1 means no limit.

    It runs as `shards` all-reduces at the same time, each of one shard of the vector. Each lists
    the replicas from another first member. So several devices share the work of a reduction at one
    device, and XLA does not combine the all-reduces. With more shards than replicas, a shard waits
    for an earlier one. See Note [Collectives that stay apart].
    """

    algorithm: Algorithm
    shards: int = 1
    limit: int = -1

    def can_take(self, leaf: Any) -> bool:
        """Whether a leaf is small enough."""
        return self.limit < 0 or leaf.size * leaf.dtype.itemsize <= self.limit

    def all_reduce(self, vector: jax.Array, level: ReplicaGroups) -> jax.Array:
        """Return the sum over the group, `[size]`."""
        # No shard may be empty, because JAX cannot lower some collectives without elements.
        count = min(self.shards, max(vector.size, 1))
        ends = [vector.size * (i + 1) // count for i in range(count)]
        shards = [vector[a:b] for a, b in zip([0, *ends], ends, strict=False)]
        sums: list[jax.Array] = []
        for i, shard in enumerate(shards):
            # There are only as many rotations as replicas. Beyond them two shards have equal
            # groups, and XLA would combine them.
            if i >= level.size:
                (shard,) = order_after([sums[i - level.size]], [shard])
            sums.append(self.algorithm.all_reduce(shard, self.algorithm.rotate(level, i)))
        return sums[0] if count == 1 else jnp.concatenate(sums)


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
                sums.append(entry.all_reduce(own, self.level))
            for i, total in zip(mine, packed.unpack(sums), strict=True):
                results[i] = total
        return results
