"""What a device holds while virtual replicas take turns on it."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from jaxdist._mesh import ReplicaMesh


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Same:
    """A value that is the same on all replicas; held once."""

    value: Any


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Own:
    """A value of each replica; `rows` are those of this device's replicas, `[V/R, ...]`."""

    rows: Any


@dataclasses.dataclass(frozen=True)
class VirtualDevice:
    """The virtual replicas of one strategy, and which of them this device has."""

    layout: ReplicaMesh

    @property
    def axes(self) -> frozenset[str]:
        """The replica axes as the analysis wants them."""
        return frozenset(self.layout.replica_axes)

    @property
    def count(self) -> int:
        """Virtual replicas on all devices."""
        return self.layout.num_replicas

    @property
    def here(self) -> int:
        """Virtual replicas on this device."""
        return self.layout.replicas_per_place

    @functools.cached_property
    def is_whole(self) -> bool:
        """Whether one device has all of them."""
        return self.layout.num_places == 1

    def numbers(self) -> jax.Array:
        """The numbers of this device's replicas, `[V/R]`."""
        first = jax.lax.axis_index(self.layout.replica_axes) * self.here
        return first + jnp.arange(self.here, dtype=jnp.int32)

    def rows(self, held: Same | Own) -> Any:
        """A value for each of this device's replicas, `[V/R, ...]`."""
        if isinstance(held, Own):
            return held.rows
        value = held.value if hasattr(held.value, "shape") else jnp.asarray(held.value)
        return jnp.broadcast_to(value[None], (self.here, *value.shape))

    def one(self, held: Same | Own) -> Any:
        """A value that the analysis knows to be the same on all replicas."""
        return held.value if isinstance(held, Same) else held.rows[0]

    def all_rows(self, held: Same | Own) -> Any:
        """The values of all replicas, `[V, ...]`, on each device; an all-gather."""
        if isinstance(held, Same):
            value = jnp.asarray(held.value)
            return jnp.broadcast_to(value[None], (self.count, *value.shape))
        if self.is_whole or not held.rows.size:
            whole = held.rows
            if not held.rows.size:
                whole = jnp.broadcast_to(whole[:1], (self.count, *whole.shape[1:]))
        else:
            whole = jax.lax.all_gather(held.rows, self.layout.replica_axes, axis=0, tiled=True)
        return barrier(whole)


def barrier(values: Any) -> Any:
    """The same values, computed before anything that uses them, and apart from it.

    What XLA fuses decides where products and sums are rounded, so that programs of different
    numbers of devices have to be cut at the same places.
    """
    return jax.lax.optimization_barrier(values)


def literal(atom: Literal) -> Any:
    """The value of a literal, without the mesh under which it was written."""
    value = atom.val
    return np.asarray(value) if hasattr(value, "dtype") else value
