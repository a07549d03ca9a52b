"""`Handle`: the `PerReplica` that merge functions and `CrossDeviceOps` get during a trace."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxdist._mesh import ReplicaMesh
from jaxdist._typing import PyTree
from jaxdist._values.replicas.per_replica import DistributedValues, Form, PerReplica
from jaxdist.errors import ReplicaValueError


class Handle(PerReplica):
    """A `PerReplica` in a merge function: it holds the traced value of each replica."""

    __slots__ = ("layout",)

    def __init__(self, local: Any, layout: ReplicaMesh) -> None:
        # The trace sees one replica, so there is one value, whatever the number of replicas.
        super().__init__((local,))
        self.layout = layout

    @property
    def local(self) -> Any:
        """The value of the replica that is being traced."""
        return self._data[0]

    @property
    def array(self) -> jax.Array:
        """The values of all replicas as one array, as in a `PerReplica`; runs an all-gather."""
        return jax.lax.all_gather(
            self.local, self.layout.replica_axes, axis=0, tiled=self.local.ndim > 0
        )

    @property
    def form(self) -> Form:
        """The form of the global array that `array` returns."""
        return Form.SCALARS if self.local.ndim == 0 else Form.ROWS

    @property
    def is_global(self) -> bool:
        """True: a handle represents one global array."""
        return True

    @property
    def values(self) -> tuple[Any, ...]:
        """The values of all replicas; runs an all-gather, of `R` times the bytes."""
        stacked = jax.lax.all_gather(self.local, self.layout.replica_axes, axis=0)
        return tuple(stacked[i] for i in range(self.layout.num_replicas))

    def __repr__(self) -> str:
        return f"PerReplica(traced {self.local!r} on {self.layout.num_replicas} replicas)"


def get_own_value(value: PerReplica, layout: ReplicaMesh) -> Any:
    """Return this replica's value of a `PerReplica` in a merge function."""
    if isinstance(value, Handle):
        return value.local
    count = layout.num_replicas
    # A global array spans the devices of all replicas, so a traced step cannot slice it.
    if value.is_global or len(value.values) != count:
        what = (
            "it is on the devices of all replicas"
            if value.is_global
            else f"it has {len(value.values)} values, and the strategy has {count} replicas"
        )
        raise ReplicaValueError(
            f"A merge function cannot use {value!r}: {what}.\n\n"
            "A PerReplica that is made in a merge function has one value for each replica.\n\n"
            "Make one with a value for each replica, or pass the one from outside as an argument "
            "of the step: strategy.run(fn, args=(value,))."
        )
    if count == 1:
        return value.values[0]
    # The program is the same on all replicas, so each has all values and picks its own.
    rows = jnp.stack([jnp.asarray(v) for v in value.values])
    return rows[jax.lax.axis_index(layout.replica_axes)]


def as_handles(tree: PyTree, layout: ReplicaMesh) -> PyTree:
    """Return a pytree with handles in place of traced arrays; distributed values stay."""
    return jax.tree.map(
        lambda x: Handle(x, layout) if isinstance(x, jax.core.Tracer) else x,
        tree,
        is_leaf=lambda x: isinstance(x, DistributedValues),
    )


def get_own_values(tree: PyTree, layout: ReplicaMesh) -> PyTree:
    """Return a pytree with this replica's values in place of `PerReplica`; variables stay."""
    return jax.tree.map(
        lambda x: get_own_value(x, layout) if isinstance(x, PerReplica) else x,
        tree,
        is_leaf=lambda x: isinstance(x, DistributedValues),
    )
