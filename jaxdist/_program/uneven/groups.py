"""The groups of replicas with equal local shapes."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxdist._typing import AxisNames


@dataclasses.dataclass(frozen=True)
class Groups:
    """The group of each replica."""

    of_replica: tuple[int, ...]
    axes: AxisNames

    @property
    def count(self) -> int:
        """The number of groups."""
        return max(self.of_replica) + 1

    def members(self, group: int) -> list[int]:
        """Return the replicas of one group."""
        return [r for r, g in enumerate(self.of_replica) if g == group]

    def describe(self, texts: Sequence[str]) -> str:
        """Return one line for each group: the numbers of its replicas, and its text."""
        return "\n".join(f"replicas {self.members(g)}: {text}" for g, text in enumerate(texts))

    def get_own_group(self) -> Any:
        """Return the group of the current replica, traced."""
        return jnp.asarray(self.of_replica, jnp.int32)[jax.lax.axis_index(self.axes)]
