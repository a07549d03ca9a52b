"""An all-reduce of one vector as several all-reduces at a time."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxdist._collectives.algorithms.algorithm import Algorithm
from jaxdist._collectives.algorithms.replica_groups import ReplicaGroups
from jaxdist._collectives.marks.after import order_after


@dataclasses.dataclass(frozen=True)
class InShards:
    """`count` all-reduces at the same time, each of one shard of the vector.

    Each lists the replicas from another first member. So several devices share the work of a
    reduction at one device, and XLA does not combine the all-reduces. With more shards than
    replicas, a shard waits for an earlier one. See Note [Collectives that stay apart].
    """

    algorithm: Algorithm
    count: int

    def all_reduce(self, vector: jax.Array, level: ReplicaGroups) -> jax.Array:
        """Return the sum over the group, `[size]`."""
        # No shard may be empty, because JAX cannot lower some collectives without elements.
        count = min(self.count, max(vector.size, 1))
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
