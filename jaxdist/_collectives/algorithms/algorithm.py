"""The interface of all-reduce algorithms, and the groups of replicas that communicate."""

import abc
import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist._mesh import ReplicaMesh
from jaxdist.errors import ArgumentError


@dataclasses.dataclass(frozen=True)
class ReplicaGroups:
    """Groups of replicas, all of one size; a collective runs within each group.

    Replicas are numbered over `axes`, the last axis fastest. The order within a group is the order
    in which concatenations have its members.
    """

    axes: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...]
    # The sizes of the replica axes, in the order of the mesh. Only `permute` needs them.
    on_mesh: tuple[tuple[str, int], ...]

    @property
    def size(self) -> int:
        """The number of replicas in a group."""
        return len(self.groups[0])

    @property
    def is_whole(self) -> bool:
        """Whether all replicas are one group."""
        return len(self.groups) == 1

    @property
    def name(self) -> Any:
        """The `axis_name` argument of JAX's collectives."""
        return self.axes[0] if len(self.axes) == 1 else self.axes

    @property
    def index_groups(self) -> list[list[int]] | None:
        """The `axis_index_groups` argument of JAX's collectives."""
        in_order = self.is_whole and self.groups[0] == tuple(range(self.size))
        return None if in_order else [list(g) for g in self.groups]

    def rank(self) -> jax.Array:
        """Return this replica's number in its group, traced."""
        number = jax.lax.axis_index(self.name)
        if self.index_groups is None:
            return number
        places = {r: i for group in self.groups for i, r in enumerate(group)}
        return jnp.asarray([places[r] for r in range(len(places))], jnp.int32)[number]

    def all_to_all(self, rows: jax.Array) -> jax.Array:
        """Return row `i` of every member, where `i` is this replica's number in its group."""
        return jax.lax.all_to_all(
            rows, self.name, 0, 0, axis_index_groups=self.index_groups, tiled=True
        )

    def permute(self, array: jax.Array, routes: Iterable[tuple[int, int]]) -> jax.Array:
        """Return `array` sent along the routes within every group; zeros where nothing arrives."""
        numbers = self._numbers_on_mesh()
        pairs = [(numbers[g[a]], numbers[g[b]]) for a, b in routes for g in self.groups]
        names = tuple(name for name, _ in self.on_mesh)
        return jax.lax.ppermute(array, names[0] if len(names) == 1 else names, pairs)

    def _numbers_on_mesh(self) -> list[int]:
        """Return the number of each replica when the axes are in the order of the mesh.

        `ppermute` counts in this order, whatever order its axes have. All other collectives of JAX
        follow the order of their axes.
        """
        sizes = dict(self.on_mesh)
        grid = np.arange(math.prod(sizes.values())).reshape(list(sizes.values()))
        order = [list(sizes).index(a) for a in self.axes]
        return grid.transpose(order).ravel().tolist()

    def rotate(self, by: int) -> "ReplicaGroups":
        """Return the same groups, each listed from another member."""
        by %= self.size
        return dataclasses.replace(self, groups=tuple(g[by:] + g[:by] for g in self.groups))


def group_all(layout: ReplicaMesh) -> ReplicaGroups:
    """Return all replicas as one group."""
    on_mesh = tuple(
        (a, int(layout.mesh.shape[a])) for a in layout.mesh.axis_names if a in layout.replica_axes
    )
    return ReplicaGroups(layout.replica_axes, (tuple(range(layout.num_replicas)),), on_mesh)


def split(level: ReplicaGroups, local: int) -> tuple[ReplicaGroups, ReplicaGroups]:
    """Return the groups within workers of `local` replicas each, and the groups across workers.

    The replicas of one worker are neighbours. Across workers, the first replicas of all workers are
    a group, the second ones are the next group, and so on.

    Raises:
        ArgumentError: `local` does not divide the number of replicas.
    """
    if local < 1 or level.size % local:
        raise ArgumentError(
            f"An all-reduce in two levels got {level.size} replicas, with {local} for each worker."
            "\n\n"
            "Every worker has the same number of replicas.\n\n"
            f"Use one of {[n for n in range(1, level.size + 1) if level.size % n == 0]} replicas "
            "for each worker."
        )
    workers = tuple(
        group[i : i + local] for group in level.groups for i in range(0, level.size, local)
    )
    across = tuple(group[i::local] for group in level.groups for i in range(local))
    return dataclasses.replace(level, groups=workers), dataclasses.replace(level, groups=across)


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
