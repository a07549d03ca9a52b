"""What every all-reduce algorithm can do."""

import abc

import jax
import jax.numpy as jnp

from jaxdist._collectives.algorithms.replica_groups import ReplicaGroups


class Algorithm(abc.ABC):
    """A way to add up a vector over the replicas of each group of a level.

    Called inside a mapped step, on a vector `[size]` of each replica. All replicas of a group get
    the same bits.
    """

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """As in the specs of `MultiWorkerAllReduce`."""

    @abc.abstractmethod
    def all_reduce(self, vector: jax.Array, level: ReplicaGroups) -> jax.Array:
        """The sum over the group, `[size]`, on every replica of it."""

    def rotate(self, level: ReplicaGroups, by: int) -> ReplicaGroups:
        """The level with the work in other hands: each group counted from another member."""
        return level.rotate(by)


class Scattering(Algorithm):
    """An algorithm whose two halves can be had alone."""

    @abc.abstractmethod
    def reduce_scatter(self, vector: jax.Array, level: ReplicaGroups) -> jax.Array:
        """The sum over the group of this replica's part, `[ceil(size / n)]`."""

    @abc.abstractmethod
    def all_gather(self, part: jax.Array, level: ReplicaGroups) -> jax.Array:
        """The parts of the group one after the other, `[n * part]`."""


def padded(vector: jax.Array, multiple: int) -> jax.Array:
    """`vector` with zeros at its end, up to a multiple."""
    missing = -vector.size % multiple
    return jnp.pad(vector, (0, missing)) if missing else vector
