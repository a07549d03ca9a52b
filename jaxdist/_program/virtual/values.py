"""Values of the virtual replicas of one device."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from jaxdist._mesh import ReplicaMesh


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Same:
    """A value that is equal on all replicas, stored once."""

    value: Any


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Own:
    """A value of its own for each replica; `rows` has those of this device, `[V/R, ...]`."""

    rows: Any


@dataclasses.dataclass(frozen=True)
class VirtualDevice:
    """The virtual replicas of one strategy, as one device sees them inside `shard_map`.

    V is the number of virtual replicas, R the number of devices; each device has V/R of them.
    """

    layout: ReplicaMesh

    @property
    def axes(self) -> frozenset[str]:
        """The replica axes in the form of the replication analysis."""
        return frozenset(self.layout.replica_axes)

    @property
    def count(self) -> int:
        """The number of virtual replicas on all devices, V."""
        return self.layout.num_replicas

    @property
    def num_local(self) -> int:
        """The number of virtual replicas on this device, V/R."""
        return self.layout.replicas_per_place

    def get_numbers(self) -> jax.Array:
        """Return the numbers of this device's replicas, `[V/R]`."""
        first = jax.lax.axis_index(self.layout.replica_axes) * self.num_local
        return first + jnp.arange(self.num_local, dtype=jnp.int32)

    def rows(self, held: Same | Own) -> Any:
        """Return a value for each of this device's replicas, `[V/R, ...]`."""
        if isinstance(held, Own):
            return held.rows
        value = held.value if hasattr(held.value, "shape") else jnp.asarray(held.value)
        return jnp.broadcast_to(value[None], (self.num_local, *value.shape))

    def get_one(self, held: Same | Own) -> Any:
        """Return a value that the analysis has proved to be equal on all replicas."""
        return held.value if isinstance(held, Same) else held.rows[0]

    def gather_rows(self, held: Same | Own) -> Any:
        """All-gather the values of all replicas to each device, `[V, ...]`."""
        if isinstance(held, Same):
            value = jnp.asarray(held.value)
            return jnp.broadcast_to(value[None], (self.count, *value.shape))
        rows = held.rows
        # Arrays without elements need no communication.
        if not rows.size:
            rows = jnp.broadcast_to(rows[:1], (self.count, *rows.shape[1:]))
        elif self.layout.num_places > 1:
            rows = jax.lax.all_gather(rows, self.layout.replica_axes, axis=0, tiled=True)
        return barrier(rows)


def barrier(values: Any) -> Any:
    """Return the same values behind an optimization barrier.

    XLA does not fuse across it. Fusion decides where products and sums are rounded, so the programs
    for different numbers of devices need barriers at the same places.
    """
    return jax.lax.optimization_barrier(values)


def get_literal(atom: Literal) -> Any:
    """Return the value of a literal, without the mesh under which it was traced."""
    value = atom.val
    return np.asarray(value) if hasattr(value, "dtype") else value
