"""Round a ring of neighbours."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxdist._collectives.algorithms.algorithm import Scattering, padded
from jaxdist._collectives.algorithms.repeated import repeated
from jaxdist._collectives.algorithms.replica_groups import ReplicaGroups


@dataclasses.dataclass(frozen=True)
class Ring(Scattering):
    """Parts travel round a ring, are added to on the first round and kept on the second.

    Cost:
        `2 (n-1)` permutes of `1/n` of the bytes: the least that point-to-point messages can do,
        in the most steps.

    Source:
        Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
        workstations", 2009; `xring` in `tf.contrib.distribute.MultiWorkerAllReduce`.
    """

    @property
    def name(self) -> str:
        """As in specs."""
        return "xring"

    def all_reduce(self, vector: jax.Array, level: ReplicaGroups) -> jax.Array:
        """Two rounds."""
        part = self.reduce_scatter(vector, level)
        return self.all_gather(part, level)[: vector.size]

    def reduce_scatter(self, vector: jax.Array, level: ReplicaGroups) -> jax.Array:
        """`n-1` permutes; part p ends at place p, added up in the order of the ring."""
        n = level.size
        parts = padded(vector, n).reshape(n, -1)
        here = level.rank()

        def part(step: jax.Array | int) -> jax.Array:
            return jax.lax.dynamic_index_in_dim(parts, (here - 1 - step) % n, keepdims=False)

        def passed(step: jax.Array | int, travelling: jax.Array) -> jax.Array:
            return level.permute(travelling, _round(n)) + part(step + 1)

        return repeated(n - 1, passed, part(0))

    def all_gather(self, part: jax.Array, level: ReplicaGroups) -> jax.Array:
        """`n-1` permutes; every place keeps what comes by."""
        n = level.size
        here = level.rank()
        empty = jnp.zeros((n, part.size), part.dtype)
        kept = jax.lax.dynamic_update_index_in_dim(empty, part, here, 0)

        def passed(
            step: jax.Array | int, state: tuple[jax.Array, jax.Array]
        ) -> tuple[jax.Array, jax.Array]:
            travelling, kept = state
            travelling = level.permute(travelling, _round(n))
            whose = (here - 1 - step) % n
            return travelling, jax.lax.dynamic_update_index_in_dim(kept, travelling, whose, 0)

        return repeated(n - 1, passed, (part, kept))[1].ravel()


def _round(n: int) -> list[tuple[int, int]]:
    return [(i, (i + 1) % n) for i in range(n)]
