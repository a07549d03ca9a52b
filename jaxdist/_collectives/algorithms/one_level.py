"""All-reduce algorithms within one group of replicas."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jaxdist import _compat
from jaxdist._collectives.algorithms.algorithm import (
    Algorithm,
    ReplicaGroups,
    Scattering,
    exchange_parts,
    pad_to_multiple,
)


@dataclasses.dataclass(frozen=True)
class Xla(Scattering):
    """One all-reduce, reduce-scatter or all-gather of XLA; the backend chooses how it runs.

    Cost:
        At best `2 (n-1)/n` of the bytes in and out of each device.

    Source:
        `nccl` in `tf.contrib.distribute.MultiWorkerAllReduce`.
    """

    # In reports. Specs call it `nccl`, but it is NCCL only on GPUs.
    name = "xla"

    def all_reduce(self, vector: jax.Array, level: ReplicaGroups) -> jax.Array:
        """Return the sum by one `psum`."""
        return jax.lax.psum(
            hide_complex_constant(vector), level.name, axis_index_groups=level.index_groups
        )

    def reduce_scatter(self, vector: jax.Array, level: ReplicaGroups) -> jax.Array:
        """Return this replica's part of the sum by one `psum_scatter`."""
        return jax.lax.psum_scatter(
            hide_complex_constant(pad_to_multiple(vector, level.size)),
            level.name,
            axis_index_groups=level.index_groups,
            tiled=True,
        )


def hide_complex_constant(array: jax.Array) -> jax.Array:
    """Hide a complex array from XLA, which aborts the process if it sums a complex constant."""
    is_complex = jnp.issubdtype(array.dtype, jnp.complexfloating)
    return jax.lax.optimization_barrier(array) if is_complex else array


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


@dataclasses.dataclass(frozen=True)
class Host(Scattering):
    """The host of every accelerator sums the vectors of the group.

    On CPU devices, the host is the device. The reduction is then that of `OneDevice`.

    Cost:
        On accelerators an all-gather, `n-1` times the bytes into each device, and `n` times the
        bytes between device and host. On CPU the cost of `OneDevice`.

    Args:
        platform: `'cpu'`, `'gpu'` or `'tpu'`.

    Source:
        `pscpu` in `tf.contrib.distribute.MultiWorkerAllReduce`.
    """

    platform: str

    name = "pscpu"

    def all_reduce(self, vector: jax.Array, level: ReplicaGroups) -> jax.Array:
        """Return the same sum, in the same order, computed by the host of every device."""
        if self.platform == "cpu":
            return OneDevice().all_reduce(vector, level)
        rows = self.all_gather(vector, level).reshape(level.size, -1)
        return _compat.compute_on_host(_sum_rows, rows)

    def reduce_scatter(self, vector: jax.Array, level: ReplicaGroups) -> jax.Array:
        """Return this device's part of the sum, computed by its host, after an all-to-all."""
        if self.platform == "cpu":
            return OneDevice().reduce_scatter(vector, level)
        return _compat.compute_on_host(_sum_rows, exchange_parts(vector, level))


def _sum_rows(rows: jax.Array) -> jax.Array:
    """Return the sum of rows in their own dtype."""
    # `jnp.sum` would widen small integers.
    return jnp.sum(rows, axis=0, dtype=rows.dtype)


T = TypeVar("T")

# More steps than these become a loop. An unrolled ring over a pod would take minutes to compile.
MAX_UNROLLED = 64


@dataclasses.dataclass(frozen=True)
class Ring(Scattering):
    """Parts move around a ring twice: the first time they are summed, the second time copied.

    Cost:
        `2 (n-1)` permutes of `1/n` of the bytes. No algorithm of point-to-point messages sends
        fewer bytes; this one has the most steps.

    Source:
        Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
        workstations", 2009; `xring` in `tf.contrib.distribute.MultiWorkerAllReduce`.
    """

    name = "xring"

    def all_reduce(self, vector: jax.Array, level: ReplicaGroups) -> jax.Array:
        """Return the sum after two rounds."""
        part = self.reduce_scatter(vector, level)
        return self.all_gather(part, level)[: vector.size]

    def reduce_scatter(self, vector: jax.Array, level: ReplicaGroups) -> jax.Array:
        """Return part p at rank p by `n-1` permutes, summed in the order of the ring."""
        n = level.size
        parts = pad_to_multiple(vector, n).reshape(n, -1)
        here = level.rank()

        def part(step: jax.Array | int) -> jax.Array:
            # Each replica starts with the part of the replica before it. After `n-1` steps the
            # part that it has is its own.
            return jax.lax.dynamic_index_in_dim(parts, (here - 1 - step) % n, keepdims=False)

        def pass_on(step: jax.Array | int, travelling: jax.Array) -> jax.Array:
            return level.permute(travelling, _list_routes(n)) + part(step + 1)

        return _repeat(n - 1, pass_on, part(0))

    def all_gather(self, part: jax.Array, level: ReplicaGroups) -> jax.Array:
        """Return all parts by `n-1` permutes. Every replica copies each part that it receives."""
        n = level.size
        here = level.rank()
        empty = jnp.zeros((n, part.size), part.dtype)
        kept = jax.lax.dynamic_update_index_in_dim(empty, part, here, 0)

        def pass_on(
            step: jax.Array | int, state: tuple[jax.Array, jax.Array]
        ) -> tuple[jax.Array, jax.Array]:
            travelling, kept = state
            travelling = level.permute(travelling, _list_routes(n))
            whose = (here - 1 - step) % n
            return travelling, jax.lax.dynamic_update_index_in_dim(kept, travelling, whose, 0)

        return _repeat(n - 1, pass_on, (part, kept))[1].ravel()


def _list_routes(n: int) -> list[tuple[int, int]]:
    """Return the routes from each replica to the next one."""
    return [(i, (i + 1) % n) for i in range(n)]


def _repeat(count: int, step: Callable[[Any, T], T], state: T) -> T:
    """Return the state after `step(i, state)` for i = 0 .. count - 1."""
    if count > MAX_UNROLLED:
        return jax.lax.fori_loop(0, count, step, state)
    for i in range(count):
        state = step(i, state)
    return state


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
