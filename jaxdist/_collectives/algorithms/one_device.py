"""The all-reduce at one device."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxdist._collectives.algorithms.algorithm import Scattering, pad_to_multiple
from jaxdist._collectives.algorithms.replica_groups import ReplicaGroups


@dataclasses.dataclass(frozen=True)
class OneDevice(Scattering):
    """A tree of messages sums all vectors at the first replica; another tree returns the sum.

    Cost:
        `2 ceil(log2 n)` permutes of all bytes. The first replica receives log2 n of them.

    Source:
        `psgpu` in `tf.contrib.distribute.MultiWorkerAllReduce`;
        `tf.distribute.ReductionToOneDevice`.
    """

    @property
    def name(self) -> str:
        """The name in specs."""
        return "psgpu"

    def all_reduce(self, vector: jax.Array, level: ReplicaGroups) -> jax.Array:
        """Return the sum by a binomial tree, up and down."""
        n, here = level.size, level.rank()
        distances = [1 << i for i in range((n - 1).bit_length())]
        for d in distances:
            # A replica that receives nothing gets zeros, so every replica can add without a branch.
            vector = vector + level.permute(vector, [(i + d, i) for i in range(0, n - d, 2 * d)])
        for d in reversed(distances):
            given = level.permute(vector, [(i, i + d) for i in range(0, n - d, 2 * d)])
            vector = jnp.where(here % (2 * d) == d, given, vector)
        return vector

    def reduce_scatter(self, vector: jax.Array, level: ReplicaGroups) -> jax.Array:
        """Return this replica's part of the sum, by an all-to-all."""
        n = level.size
        parts = pad_to_multiple(vector, n).reshape(n, -1)
        mine = jax.lax.all_to_all(
            parts, level.name, 0, 0, axis_index_groups=level.index_groups, tiled=True
        )
        return jnp.sum(mine, axis=0, dtype=vector.dtype)

    def all_gather(self, part: jax.Array, level: ReplicaGroups) -> jax.Array:
        """Return the parts of all replicas, by an all-gather."""
        whole: jax.Array = jax.lax.all_gather(
            part, level.name, axis_index_groups=level.index_groups, tiled=True
        )
        return whole
