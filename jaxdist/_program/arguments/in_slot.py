"""How a leaf of a call goes into a program."""

import dataclasses
import math
from typing import Any

import jax
from jax.sharding import NamedSharding

from jaxdist import _compat
from jaxdist._mesh import ReplicaMesh
from jaxdist._values import (
    Cut,
    Form,
    Kind,
    PerReplica,
    Placement,
    Sharded,
    placement_of,
    sharded_placement,
)


@dataclasses.dataclass(frozen=True)
class InSlot:
    """One traced input: what arrives, and what a replica sees of it."""

    placement: Placement
    shape: tuple[int, ...]  # global
    dtype: Any
    weak_type: bool
    is_scalar: bool  # a local scalar, held as one element of a global [R]
    cut: Cut | None = None  # of one array in pieces
    is_variable: bool = False  # a variable that the step uses, and no argument of it

    @property
    def kind(self) -> Kind:
        """Mirrored, per-replica or sharded."""
        return self.placement.kind

    @property
    def sharding(self) -> NamedSharding:
        """The layout over the whole mesh."""
        return self.placement.sharding

    def local_shape(self, num_replicas: int) -> tuple[int, ...]:
        """The shape that one replica sees."""
        if self.kind is Kind.MIRRORED:
            return self.shape
        if self.cut is not None:
            return self.cut.local_shape(self.shape, self.cut_in(num_replicas))
        return () if self.is_scalar else (self.shape[0] // num_replicas, *self.shape[1:])

    def differs(self, axes: frozenset[str]) -> frozenset[str]:
        """Of these replica axes, those over which replicas see different values."""
        if self.cut is not None and self.cut.axes is not None:
            return axes & frozenset(self.cut.axes)
        return frozenset() if self.kind is Kind.MIRRORED else axes

    def cut_in(self, num_replicas: int) -> int:
        """How many pieces there are of one array in pieces."""
        if self.cut is None or self.cut.axes is None:
            return num_replicas
        return math.prod(self.sharding.mesh.shape[a] for a in self.cut.axes)

    def abstract(self) -> jax.ShapeDtypeStruct:
        """Shape, dtype and layout, as JAX's lowering takes them."""
        return jax.ShapeDtypeStruct(
            self.shape, self.dtype, weak_type=self.weak_type, sharding=self.sharding
        )


def in_slot(leaf: Any, layout: ReplicaMesh) -> InSlot:
    """The slot of a leaf that was checked against the strategy."""
    if isinstance(leaf, Sharded):
        held = leaf.held
        placement = sharded_placement(leaf, layout)
        return InSlot(placement, tuple(held.shape), held.dtype, False, False, leaf.cut)
    placement = placement_of(leaf, layout)
    scalar = isinstance(leaf, PerReplica) and leaf.form is Form.SCALARS
    array = leaf.array if isinstance(leaf, PerReplica) else leaf
    if isinstance(array, (jax.Array, jax.ShapeDtypeStruct)):
        weak = bool(getattr(array, "weak_type", False))
        return InSlot(placement, tuple(array.shape), array.dtype, weak, scalar)
    aval = jax.typeof(array)
    return InSlot(placement, tuple(aval.shape), aval.dtype, bool(aval.weak_type), scalar)


def must_move(leaf: Any, slot: InSlot) -> bool:
    """Whether an array is tied to devices or a layout that the program does not take."""
    if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
        return False
    if not _compat.is_committed(leaf):
        return False
    return not leaf.sharding.is_equivalent_to(slot.sharding, leaf.ndim)
