"""One vector in several all-reduces at a time."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxdist._collectives.algorithms.algorithm import Algorithm
from jaxdist._collectives.algorithms.replica_groups import ReplicaGroups
from jaxdist._collectives.marks.after import after


@dataclasses.dataclass(frozen=True)
class InShards:
    """`count` all-reduces side by side, each of a shard of the vector.

    Each counts the replicas from another one. So the work of a reduction at one device falls to
    several, and XLA does not put the all-reduces together again, as it does with those over
    the same groups. Beyond as many shards as replicas, one waits for another.
    """

    algorithm: Algorithm
    count: int

    def all_reduce(self, vector: jax.Array, level: ReplicaGroups) -> jax.Array:
        """The sum over the group, `[size]`."""
        count = min(self.count, max(vector.size, 1))
        ends = [vector.size * (i + 1) // count for i in range(count)]
        shards = [vector[a:b] for a, b in zip([0, *ends], ends, strict=False)]
        sums: list[jax.Array] = []
        for i, shard in enumerate(shards):
            if i >= level.size:
                (shard,) = after([sums[i - level.size]], [shard])
            sums.append(self.algorithm.all_reduce(shard, self.algorithm.rotate(level, i)))
        return sums[0] if count == 1 else jnp.concatenate(sums)
