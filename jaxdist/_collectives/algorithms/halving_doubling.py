"""The all-reduce by recursive halving and doubling."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxdist._collectives.algorithms.algorithm import Algorithm, pad_to_multiple
from jaxdist._collectives.algorithms.replica_groups import ReplicaGroups


@dataclasses.dataclass(frozen=True)
class HalvingDoubling(Algorithm):
    """Partners at halved distances exchange halves of their vectors, and then return the sums.

    The exchange needs a power of two. For a number n of replicas, let m be the largest power of two
    that is not above n. Then `n - m` replicas first add their vectors to a neighbour's, and get the
    result from it at the end.

    Cost:
        `2 log2 m` exchanges: of `1/2, 1/4, ... 1/m` of the bytes while halving, and the same while
        doubling. These are as few bytes as a ring sends, in fewer steps. If n is not a power of
        two, two more permutes of all bytes.

    Source:
        Rabenseifner's algorithm: Thakur, Rabenseifner and Gropp, "Optimization of collective
        communication operations in MPICH", 2005; `rechd` in
        `tf.contrib.distribute.MultiWorkerAllReduce`.
    """

    name = "rechd"

    def all_reduce(self, vector: jax.Array, level: ReplicaGroups) -> jax.Array:
        """Return the sum by `2 log2 m` permutes, and two more if n is not a power of two."""
        n, m = level.size, _find_core_size(level.size)
        extra = n - m
        doubled = [(2 * i + 1, 2 * i) for i in range(extra)]
        total = vector + level.permute(vector, doubled) if extra else vector
        part = self._halve(pad_to_multiple(total, m), level)
        total = self._double(part, level)[: vector.size]
        if not extra:
            return total
        back = level.permute(total, [(b, a) for a, b in doubled])
        here = level.rank()
        # Only the replicas outside of the core receive something from this permute; the others get
        # zeros.
        return jnp.where((here < 2 * extra) & (here % 2 == 1), back, total)

    def _halve(self, vector: jax.Array, level: ReplicaGroups) -> jax.Array:
        """Return the sum of this replica's part of m; outside of the core it is not a sum."""
        number = _find_core_rank(level)
        for distance in reversed(_list_distances(level.size)):
            low, high = jnp.split(vector, 2)
            is_high = number // distance % 2 == 1
            partners = _list_exchanges(level.size, distance)
            # Each partner sends the half that the other one keeps.
            given = level.permute(jnp.where(is_high, low, high), partners)
            vector = jnp.where(is_high, high, low) + given
        return vector

    def _double(self, part: jax.Array, level: ReplicaGroups) -> jax.Array:
        """Return the whole vector from the parts of the core."""
        number = _find_core_rank(level)
        for distance in _list_distances(level.size):
            is_high = number // distance % 2 == 1
            given = level.permute(part, _list_exchanges(level.size, distance))
            low, high = jnp.where(is_high, given, part), jnp.where(is_high, part, given)
            part = jnp.concatenate([low, high])
        return part


def _find_core_size(n: int) -> int:
    """Return the largest power of two that is not above n."""
    return 1 << (n.bit_length() - 1)


def _list_distances(n: int) -> list[int]:
    """Return the distances between partners, from 1 up."""
    return [1 << i for i in range(n.bit_length() - 1)]


def _rank_of_member(number: int, n: int) -> int:
    """Return the rank of the core's member `number`.

    Of each pair with a replica outside of the core, the first one is in the core.
    """
    extra = n - _find_core_size(n)
    return 2 * number if number < extra else number + extra


def _find_core_rank(level: ReplicaGroups) -> jax.Array:
    """Return the number of this replica in the core, traced."""
    n = level.size
    extra = n - _find_core_size(n)
    here = level.rank()
    return jnp.where(here < 2 * extra, here // 2, here - extra) if extra else here


def _list_exchanges(n: int, distance: int) -> list[tuple[int, int]]:
    """Return the routes of an exchange between partners at a distance."""
    return [
        (_rank_of_member(i, n), _rank_of_member(i ^ distance, n)) for i in range(_find_core_size(n))
    ]
