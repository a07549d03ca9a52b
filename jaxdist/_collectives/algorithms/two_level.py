"""Within workers first, then across them, then back."""

import dataclasses

import jax

from jaxdist._collectives.algorithms.algorithm import Algorithm, Scattering
from jaxdist._collectives.algorithms.replica_groups import ReplicaGroups, split


@dataclasses.dataclass(frozen=True)
class TwoLevel(Algorithm):
    """Each replica of a worker sums a part within it, and carries that part to the other workers.

    Cost:
        `1/local` of the bytes goes in and out of each device across workers, the least that is
        possible: a reduce-scatter within workers of `local` replicas, an all-reduce of the part
        across, an all-gather within.

    Source:
        Names with a slash in `tf.contrib.distribute.MultiWorkerAllReduce`.
    """

    inner: Scattering
    outer: Algorithm
    local: int

    @property
    def name(self) -> str:
        """`inner/outer`."""
        return f"{self.inner.name}/{self.outer.name}"

    def all_reduce(self, vector: jax.Array, level: ReplicaGroups) -> jax.Array:
        """A reduce-scatter, an all-reduce of the part, an all-gather."""
        within, across = split(level, self.local)
        if within.size == 1:
            return self.outer.all_reduce(vector, across)
        if across.size == 1:
            return self.inner.all_reduce(vector, within)
        part = self.inner.reduce_scatter(vector, within)
        part = self.outer.all_reduce(part, across)
        return self.inner.all_gather(part, within)[: vector.size]

    def rotate(self, level: ReplicaGroups, by: int) -> ReplicaGroups:
        """Other members first within every worker, and other workers first; workers stay."""
        round_, first = divmod(by % level.size, self.local)
        within, _ = split(level, self.local)
        workers = [list(g) for g in within.rotate(first).groups]
        count = level.size // self.local
        start = (round_ + first) % count
        groups = []
        for i in range(0, len(workers), count):
            own = workers[i : i + count]
            groups.append(tuple(r for worker in own[start:] + own[:start] for r in worker))
        return dataclasses.replace(level, groups=tuple(groups))
