"""The kind, layout and shape of each input and each result of a program."""

import dataclasses
import math
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxdist import _compat
from jaxdist._mesh import ReplicaMesh, make_auto_sharding
from jaxdist._values import (
    Cut,
    Form,
    Kind,
    PerReplica,
    Placement,
    Sharded,
    array_of,
    placement_of,
    sharded_placement,
)


@dataclasses.dataclass(frozen=True)
class InSlot:
    """One traced input of a program: the global array, and what one replica gets of it."""

    placement: Placement
    shape: tuple[int, ...]  # global
    dtype: Any
    weak_type: bool
    is_scalar: bool  # a scalar on each replica, stored as one element of a global [R]
    cut: Cut | None = None  # of a `Sharded` array
    is_variable: bool = False  # a variable that the step uses, not an argument

    @property
    def kind(self) -> Kind:
        """The kind of placement: mirrored, per-replica or sharded."""
        return self.placement.kind

    @property
    def sharding(self) -> NamedSharding:
        """The sharding over the whole mesh."""
        return self.placement.sharding

    def local_shape(self, num_replicas: int) -> tuple[int, ...]:
        """Return the shape on one replica."""
        if self.kind is Kind.MIRRORED:
            return self.shape
        if self.cut is not None:
            return self.cut.local_shape(self.shape, self.num_pieces(num_replicas))
        return () if self.is_scalar else (self.shape[0] // num_replicas, *self.shape[1:])

    def differs(self, axes: frozenset[str]) -> frozenset[str]:
        """Return those of these replica axes along which replicas get different values."""
        # A shard may be replicated over some of the axes: only those that it is cut along differ.
        if self.cut is not None and self.cut.axes is not None:
            return axes & frozenset(self.cut.axes)
        return frozenset() if self.kind is Kind.MIRRORED else axes

    def num_pieces(self, num_replicas: int) -> int:
        """Return the number of pieces of a `Sharded` array."""
        if self.cut is None or self.cut.axes is None:
            return num_replicas
        return math.prod(self.sharding.mesh.shape[a] for a in self.cut.axes)

    def abstract(self, *, on_users_mesh: bool = False) -> jax.ShapeDtypeStruct:
        """Return shape, dtype and sharding as `jax.jit(...).lower` takes them.

        All axes are Auto, or have the types of the user's mesh.
        """
        sharding = self.sharding if on_users_mesh else make_auto_sharding(self.sharding)
        return jax.ShapeDtypeStruct(
            self.shape, self.dtype, weak_type=self.weak_type, sharding=sharding
        )


def make_in_slot(leaf: Any, layout: ReplicaMesh) -> InSlot:
    """Return the `InSlot` of a leaf that was already checked against the strategy."""
    if isinstance(leaf, Sharded):
        held = leaf.held
        placement = sharded_placement(leaf, layout)
        return InSlot(placement, tuple(held.shape), held.dtype, False, False, leaf.cut)
    placement = placement_of(leaf, layout)
    scalar = isinstance(leaf, PerReplica) and leaf.form is Form.SCALARS
    array = array_of(leaf)
    has_aval = isinstance(array, (jax.Array, jax.ShapeDtypeStruct))
    aval = array if has_aval else jax.typeof(array)
    weak = bool(getattr(aval, "weak_type", False))
    return InSlot(placement, tuple(aval.shape), aval.dtype, weak, scalar)


def must_move(leaf: Any, slot: InSlot) -> bool:
    """Whether a committed array lacks the sharding that the program needs."""
    if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
        return False
    # JAX moves uncommitted arrays itself.
    if not _compat.is_committed(leaf):
        return False
    return not leaf.sharding.is_equivalent_to(slot.sharding, leaf.ndim)


@dataclasses.dataclass(frozen=True)
class OutSlot:
    """One traced result of a program: its name, its kind, and its shape on one replica."""

    name: str
    kind: Kind
    shape: tuple[int, ...]  # on one replica
    dtype: Any
    cut: Cut | None = None  # of a `Sharded` array
    # For a result with a sharding constraint by the step: how many logical devices split each dim.
    parts: tuple[int, ...] | None = None

    def spec(self, layout: ReplicaMesh) -> PartitionSpec:
        """Return the partitioning over the replica axes."""
        if self.cut is not None:
            return self.cut.spec(layout)
        return layout.replica_spec if self.kind is Kind.PER_REPLICA else PartitionSpec()

    def marked_sharding(self, layout: ReplicaMesh) -> NamedSharding | None:
        """Return the sharding that the step constrained this result to, as far as possible.

        A dim that cannot be split into equal parts stays whole. The rows of each replica stay
        together.
        """
        if self.parts is None or self.kind is Kind.SHARDED:
            return None
        tiles = layout.tiles(self.parts)
        # A `PartitionSpec` may have fewer entries than dims.
        spec = [*tiles.spec, *[None] * (len(self.parts) - len(tiles.spec))]
        entries = zip(spec, self.shape, self.parts, strict=True)
        even = [entry if size % count == 0 else None for entry, size, count in entries]
        if self.kind is Kind.PER_REPLICA:
            even[:1] = [layout.replica_spec[0]]
        return NamedSharding(tiles.mesh, PartitionSpec(*even))

    def remove_extra_dim(self, array: Any) -> Any:
        """Return the global array without the extra dim that each scalar has inside the program."""
        is_scalar = self.kind is not Kind.PER_REPLICA and not self.shape
        return array.reshape(()) if is_scalar else array
