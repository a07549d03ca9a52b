"""Which replicas communicate with one another."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxdist.errors import ArgumentError


@dataclasses.dataclass(frozen=True)
class Level:
    """Groups of replicas, all of one size, within each of which something is reduced.

    Replicas are counted over `axes`, the last axis fastest. The order within a group is the order
    of its members in everything that is concatenated.
    """

    axes: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        """Replicas in a group."""
        return len(self.groups[0])

    @property
    def is_whole(self) -> bool:
        """Whether all replicas are one group."""
        return len(self.groups) == 1

    @property
    def name(self) -> Any:
        """What JAX's collectives take as `axis_name`."""
        return self.axes[0] if len(self.axes) == 1 else self.axes

    @property
    def index_groups(self) -> list[list[int]] | None:
        """What JAX's collectives take as `axis_index_groups`."""
        in_order = self.is_whole and self.groups[0] == tuple(range(self.size))
        return None if in_order else [list(g) for g in self.groups]

    def place(self) -> jax.Array:
        """This replica's number in its group, traced."""
        number = jax.lax.axis_index(self.name)
        if self.index_groups is None:
            return number
        places = {r: i for group in self.groups for i, r in enumerate(group)}
        return jnp.asarray([places[r] for r in range(len(places))], jnp.int32)[number]

    def sent(self, array: jax.Array, routes: Iterable[tuple[int, int]]) -> jax.Array:
        """`array` from place to place within every group; zeros where nothing arrives."""
        pairs = [(group[a], group[b]) for a, b in routes for group in self.groups]
        return jax.lax.ppermute(array, self.name, pairs)

    def turned(self, by: int) -> "Level":
        """The same groups, counted from another member."""
        by %= self.size
        return dataclasses.replace(self, groups=tuple(g[by:] + g[:by] for g in self.groups))


def whole(axes: Sequence[str], num_replicas: int) -> Level:
    """All replicas together."""
    return Level(tuple(axes), (tuple(range(num_replicas)),))


def split(level: Level, local: int) -> tuple[Level, Level]:
    """The levels within workers of `local` replicas each, and across the workers.

    Replicas of one worker stand next to one another. Across, the first of every worker make a
    group, the second, and so on.

    Raises:
        ArgumentError: The replicas cannot be divided so.
    """
    if local < 1 or level.size % local:
        raise ArgumentError(
            f"{level.size} replicas cannot be divided among workers of {local} each.\n\n"
            "Every worker has the same number of replicas."
        )
    workers = tuple(
        group[i : i + local] for group in level.groups for i in range(0, level.size, local)
    )
    across = tuple(group[i::local] for group in level.groups for i in range(local))
    return dataclasses.replace(level, groups=workers), dataclasses.replace(level, groups=across)
