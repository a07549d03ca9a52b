"""The kinds of leaves that `reduce` and `gather` distinguish, and the request of one call.

# Note [Kinds and contexts]
`Strategy.reduce` and `gather` find the function for a leaf in one table: kind of value times
context. The column of the context outside of a step is here (`reduce.py`, `gather.py`,
`slices.py`), since `CrossDeviceOps` use it, too. `_strategies/across/calls.py` adds the columns of
a merge function and of the user's `CrossDeviceOps`. No other code checks the type of a leaf.
"""

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax

from jaxdist._called import refuse
from jaxdist._collectives.options import CommunicationOptions
from jaxdist._collectives.reduction import ReduceOp
from jaxdist._mesh import ReplicaMesh
from jaxdist._values import (
    Form,
    Handle,
    IndexedSlices,
    Kind,
    PerReplica,
    Sharded,
    as_per_replica,
    check_global,
    is_slices,
    is_sparse,
    place_per_replica,
    placement_of,
    refuse_leaked,
)
from jaxdist.errors import ReplicaValueError, UnsupportedError


class ValueKind(enum.Enum):
    """The kind of a leaf to a strategy. See Note [Kinds and contexts]."""

    HELD = "a PerReplica with one global array"
    LIST = "a PerReplica with one value for each replica"
    TRACED_VALUES = "a PerReplica of traced values"
    ROWS = "an array that is laid out over the replicas"
    TRACED = "a traced array"
    SLICES = "IndexedSlices"
    SHARDED = "a sharded array"
    ONE = "one value for all replicas"


@dataclasses.dataclass(frozen=True)
class Request:
    """The request of one call of `Strategy.reduce` or `gather`."""

    axis: Any
    layout: ReplicaMesh
    op: ReduceOp = ReduceOp.SUM  # of a reduction
    options: CommunicationOptions = dataclasses.field(default_factory=CommunicationOptions)
    ops: Any = None  # the `CrossDeviceOps` of the strategy; None: XLA reduces


# Reduces or gathers one leaf, given by name.
Function: TypeAlias = Callable[[Request, str, Any], Any]


@dataclasses.dataclass(frozen=True)
class Planned:
    """The function of a kind for which all checks depend only on shape, dtype and placement.

    Args:
        plan: Checks a leaf, and returns the function for all arrays of this shape, dtype and
            placement. It takes the global array of a `PerReplica`.
    """

    plan: Callable[[Request, str, Any], Callable[[Any], Any]]

    def __call__(self, request: Request, name: str, leaf: Any) -> Any:
        """Reduce or gather one leaf."""
        if not isinstance(leaf, PerReplica):
            return self.plan(request, name, leaf)(leaf)
        if not leaf.is_global:  # traced values
            for part in leaf.values:
                refuse_leaked(name, part)
            leaf = place_per_replica(name, leaf, request.layout)
        return self.plan(request, name, leaf)(leaf.array)


def read_rows(request: Request, name: str, leaf: Any) -> tuple[Any, tuple[int, ...]]:
    """Return the global array of a leaf and the shape of one replica's value, both checked."""
    value = as_per_replica(leaf)
    count = request.layout.num_replicas
    array = check_global(name, value, request.layout)
    is_scalar = value.form is Form.SCALARS
    return array, () if is_scalar else (array.shape[0] // count, *array.shape[1:])


_KINDS = {
    jax.core.Tracer: ValueKind.TRACED,
    IndexedSlices: ValueKind.SLICES,
    Sharded: ValueKind.SHARDED,
}


def find_kind(leaf: Any, layout: ReplicaMesh) -> ValueKind:
    """Return the kind of a leaf under a strategy with this mesh."""
    if isinstance(leaf, PerReplica):
        held = jax.tree.leaves(leaf)
        if isinstance(leaf, Handle) or any(isinstance(x, jax.core.Tracer) for x in held):
            return ValueKind.TRACED_VALUES
        return ValueKind.HELD if leaf.is_global else ValueKind.LIST
    if isinstance(leaf, jax.Array) and placement_of(leaf, layout).kind is Kind.PER_REPLICA:
        return ValueKind.ROWS
    return next((kind for type_, kind in _KINDS.items() if isinstance(leaf, type_)), ValueKind.ONE)


def check_count(name: str, values: Sequence[Any], layout: ReplicaMesh) -> None:
    """Refuse a `PerReplica` unless it has a value for each replica of this process."""
    if len(values) != len(layout.local_replicas):
        raise refuse(
            f"{name}, a PerReplica with {len(values)} values, and the strategy has "
            f"{len(layout.local_replicas)} replicas in this process.",
            "A PerReplica has one value for each replica of the strategy that made it.",
            "Use the strategy that made the value.",
            kind=ReplicaValueError,
        )


def join_slices(value: Any) -> Any:
    """Return `IndexedSlices` of per-replica parts, if a `PerReplica` has slices on each replica."""
    if isinstance(value, PerReplica) and not value.is_global:
        parts = value.values
        if all(is_slices(p) for p in parts):
            first = parts[0]
            return first.with_parts(
                PerReplica([p.values for p in parts]), PerReplica([p.indices for p in parts])
            )
    return value


def refuse_sparse(value: Any) -> None:
    """Refuse a sparse matrix of JAX, whose indices would be combined like its numbers.

    Raises:
        UnsupportedError: `value` is a sparse matrix.
    """
    if is_sparse(value):
        kind = type(value).__name__
        raise refuse(
            f"a {kind}: {value!r}.",
            "Its indices are arrays like its numbers, and would be combined with those of other "
            "replicas.",
            "Pass jaxdist.IndexedSlices(value.data, value.indices[:, 0], value.shape) for rows; "
            f"value.todense(); or value.data alone, where the {kind}s of all replicas have the "
            "same indices.",
            kind=UnsupportedError,
        )


def refuse_slices(name: str, value: Any) -> None:
    """Refuse `IndexedSlices` where whole arrays are concatenated.

    Raises:
        UnsupportedError: `value` is `IndexedSlices`, a `PerReplica` of them, or a sparse matrix.
    """
    refuse_sparse(value)
    if is_slices(join_slices(value)):
        raise refuse(
            f"{name}, which is IndexedSlices.",
            "IndexedSlices of all replicas, concatenated, mean the sum of the arrays, and not the "
            "arrays one after the other.",
            "Gather the arrays: slices.to_dense(). For the sum use reduce('SUM', slices); for the "
            "rows themselves gather slices.values and slices.indices.",
            kind=UnsupportedError,
        )
