"""The all-reduce at one device."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxdist._collectives.algorithms.algorithm import Scattering, exchange_parts
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

    name = "psgpu"

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
        return jnp.sum(exchange_parts(vector, level), axis=0, dtype=vector.dtype)
