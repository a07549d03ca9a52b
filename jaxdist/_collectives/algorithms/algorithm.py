"""The interface of all-reduce algorithms."""

import abc

import jax
import jax.numpy as jnp

from jaxdist._collectives.algorithms.replica_groups import ReplicaGroups


class Algorithm(abc.ABC):
    """An algorithm that sums a vector over the replicas of each group.

    A mapped step calls it with a vector `[size]` of each replica. All replicas of a group get the
    same bits.
    """

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The name in the specs of `MultiWorkerAllReduce`."""

    @abc.abstractmethod
    def all_reduce(self, vector: jax.Array, level: ReplicaGroups) -> jax.Array:
        """Return the sum over the group, `[size]`, on every replica of it."""

    def rotate(self, level: ReplicaGroups, by: int) -> ReplicaGroups:
        """Return the groups, each listed from another member, so that other devices do the work."""
        return level.rotate(by)


class Scattering(Algorithm):
    """An algorithm whose reduce-scatter and all-gather can be used alone."""

    @abc.abstractmethod
    def reduce_scatter(self, vector: jax.Array, level: ReplicaGroups) -> jax.Array:
        """Return this replica's part of the sum over the group, `[ceil(size / n)]`."""

    def all_gather(self, part: jax.Array, level: ReplicaGroups) -> jax.Array:
        """Return the parts of the group, concatenated, `[n * part]`; by one `all_gather` of XLA."""
        return jax.lax.all_gather(
            part, level.name, axis_index_groups=level.index_groups, tiled=True
        )


def pad_to_multiple(vector: jax.Array, multiple: int) -> jax.Array:
    """Return `vector` with zeros at its end, up to a multiple."""
    missing = -vector.size % multiple
    return jnp.pad(vector, (0, missing)) if missing else vector


def exchange_parts(vector: jax.Array, level: ReplicaGroups) -> jax.Array:
    """Return the part of this replica in the vector of each member, `[n, ceil(size / n)]`."""
    return level.all_to_all(pad_to_multiple(vector, level.size).reshape(level.size, -1))
