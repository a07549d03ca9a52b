"""The all-reduce in two levels: within workers, across them, and within them again."""

import dataclasses

import jax

from jaxdist._collectives.algorithms.algorithm import Algorithm, ReplicaGroups, Scattering, split


@dataclasses.dataclass(frozen=True)
class TwoLevel(Algorithm):
    """Each replica sums one part within its worker, and exchanges that part with other workers.

    Cost:
        A reduce-scatter within workers of `local` replicas, an all-reduce of the part across
        workers, an all-gather within workers. Between workers each device sends and receives
        `1/local` of the bytes, which is the least possible.

    Source:
        Names with a slash in `tf.contrib.distribute.MultiWorkerAllReduce`.
    """

    inner: Scattering
    outer: Algorithm
    local: int

    @property
    def name(self) -> str:
        """The name `inner/outer`."""
        return f"{self.inner.name}/{self.outer.name}"

    def all_reduce(self, vector: jax.Array, level: ReplicaGroups) -> jax.Array:
        """Return the sum by a reduce-scatter, an all-reduce of the part, and an all-gather."""
        within, across = split(level, self.local)
        # With one replica in each worker, or one worker, there is only one level.
        if within.size == 1:
            return self.outer.all_reduce(vector, across)
        if across.size == 1:
            return self.inner.all_reduce(vector, within)
        part = self.inner.reduce_scatter(vector, within)
        part = self.outer.all_reduce(part, across)
        return self.inner.all_gather(part, within)[: vector.size]

    def rotate(self, level: ReplicaGroups, by: int) -> ReplicaGroups:
        """Return the groups with other first members and other first workers."""
        # A rotation over all replicas would put replicas of two workers into one worker. So members
        # rotate within their worker, and workers rotate among each other.
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
