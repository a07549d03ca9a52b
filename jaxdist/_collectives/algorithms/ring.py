"""The all-reduce around a ring of neighbours."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jaxdist._collectives.algorithms.algorithm import Scattering, pad_to_multiple
from jaxdist._collectives.algorithms.replica_groups import ReplicaGroups

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
