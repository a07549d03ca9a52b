"""Resolves placements: returns the sharding of a leaf on a mesh, or an error with a remedy."""

import dataclasses
import math
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from jaxdist import cost
from jaxdist._mesh import ReplicaMesh
from jaxdist._values import Cut
from jaxdist.errors import ArgumentError, ShapeError
from jaxdist.partition._placements import (
    LOGICAL,
    REPLICA,
    TABLE,
    ByNames,
    Placement,
    Replicate,
    Shard,
    Split,
    is_match,
)

# A dim that the user did not name is not sharded if padding would make it longer than this factor.
_MOST_PADDING = 1.5
# The tiles in which TPUs hold arrays: rows of bfloat16, and columns.
_TILE = (16, 128)


@dataclasses.dataclass(frozen=True)
class ResolvedPlacement:
    """The sharding of a leaf, and its `Cut` if it becomes a `Sharded` value."""

    sharding: NamedSharding
    cut: Cut | None = None

    def padded_shape(self, shape: tuple[int, ...], layout: ReplicaMesh) -> tuple[int, ...]:
        """Return the shape with padding."""
        if self.cut is None:
            return shape
        more = self.cut.padding(self.cut.pieces(layout))
        return tuple(n + more * (d == self.cut.dim) for d, n in enumerate(shape))


@dataclasses.dataclass(frozen=True)
class Leaf:
    """The properties of a leaf that decide its placement."""

    path: str
    shape: tuple[int, ...]
    dtype: Any
    names: tuple[str | None, ...] | None = None  # of its dims
    stacked: bool = False  # dim 0 is over layers, and is neither sharded nor split

    def __str__(self) -> str:
        return f"{self.path}, {self.dtype}{list(self.shape)}"


def resolve(leaf: Leaf, placement: Placement, layout: ReplicaMesh) -> ResolvedPlacement:
    """Return the sharding of `leaf` by `placement`.

    Raises:
        ShapeError: A dim does not exist, or the devices do not divide it.
        ArgumentError: Axes or names do not exist.
    """
    if leaf.stacked and leaf.shape:
        names = leaf.names and leaf.names[1:]
        row = dataclasses.replace(leaf, shape=leaf.shape[1:], names=names, stacked=False)
        return _stack(resolve(row, placement, layout), layout)
    chosen = (
        _resolve_names(leaf, placement, layout) if isinstance(placement, ByNames) else placement
    )
    if not leaf.shape or isinstance(chosen, Replicate):
        return ResolvedPlacement(layout.replicated)
    wanted = chosen.dim if isinstance(chosen, Split) else chosen.split
    split = None
    if wanted is not None:
        split = _resolve_split(leaf, chosen, _resolve_dim(leaf, chosen, wanted), layout)
    # No spec below ends with None: JAX compares specs entry by entry, so equivalent shardings would
    # count as different, and a step would be compiled twice.
    cut = _resolve_cut(leaf, chosen, split, layout) if isinstance(chosen, Shard) else None
    if cut is not None:
        return ResolvedPlacement(NamedSharding(layout.mesh, cut.full_spec(layout)), cut)
    if split is None:
        return ResolvedPlacement(layout.replicated)
    spec = PartitionSpec(*[None] * split, layout.logical_axes)
    return ResolvedPlacement(NamedSharding(layout.mesh, spec))


def _stack(row: ResolvedPlacement, layout: ReplicaMesh) -> ResolvedPlacement:
    """Return the placement of many layers in one array, from the placement of one layer."""
    entries = tuple(row.sharding.spec)
    if not entries:
        return row
    sharding = NamedSharding(layout.mesh, PartitionSpec(None, *entries))
    return ResolvedPlacement(sharding, None if row.cut is None else row.cut.insert_dim(0))


def _resolve_dim(leaf: Leaf, placement: Placement, dim: int) -> int:
    rank = len(leaf.shape)
    if not -rank <= dim < rank:
        raise ShapeError(
            f"{leaf}: {placement!r} names dim {dim}, and the array has {rank} dim(s).\n\n"
            "A placement names a dim of the array.\n\n"
            + (
                f"Use one of {[*range(-rank, rank)]}."
                if rank
                else "Use partition.Replicate() for scalars."
            )
        )
    return dim % rank


def _resolve_split(
    leaf: Leaf, placement: Split | Shard, dim: int, layout: ReplicaMesh
) -> int | None:
    count = layout.num_logical
    if count == 1:
        return None
    if leaf.shape[dim] % count:
        if not placement.must_divide:
            return None
        others = [d for d, n in enumerate(leaf.shape) if n % count == 0]
        remedy = f"Split dim {' or '.join(map(str, others))}" if others else "Replicate it"
        raise ShapeError(
            _describe_indivisible(leaf, placement, dim, count, "logical devices", remedy)
        )
    return dim


def _resolve_cut(
    leaf: Leaf, placement: Shard, split: int | None, layout: ReplicaMesh
) -> Cut | None:
    axes = placement.axes
    unknown = [a for a in axes or () if a not in layout.replica_axes]
    if unknown:
        raise ArgumentError(
            f"{leaf}: {placement!r} names {unknown}, and the replica axes of this strategy are "
            f"{layout.replica_axes}.\n\n"
            "The axes of partition.Shard, fsdp and fsdp_tensor_parallel are replica axes.\n\n"
            "To shard within a slice and replicate across slices, give the strategy a mesh with "
            'an axis for each: MirroredStrategy(mesh=mesh, replica_axes=("slice", "data")).'
        )
    if axes is not None:
        # In the strategy's order, whatever order the user chose; None means all of them.
        axes = tuple(a for a in layout.replica_axes if a in axes)
        axes = None if axes == layout.replica_axes else axes
    count = Cut(0, 1, axes).pieces(layout)
    least = placement.min_bytes
    # The size from which `sharded_update` shards, so that both choose the same leaves.
    if least is None:
        least = cost.pack_below(cost.links_of(layout).inner)
    size = math.prod(leaf.shape)
    # Count 4 bytes for each element of any dtype, so that a bfloat16 parameter and its float32
    # moments have the same placement.
    if layout.num_replicas == 1 or count == 1 or not size or 4 * size < least:
        return None
    named = None if placement.dim is None else _resolve_dim(leaf, placement, placement.dim)
    is_kept = placement.must_divide or placement.pad
    if named is not None and (is_kept or leaf.shape[named] % count == 0):
        dim = named
        if dim == split:
            raise ShapeError(
                f"{leaf}: {placement!r} cuts and splits dim {dim}.\n\n"
                "One dim is cut over the replicas, and another is split over the logical devices."
                "\n\nPass another split, or leave dim out: the largest of the other dims is cut."
            )
        if leaf.shape[dim] % count and not placement.pad:
            others = [d for d, n in enumerate(leaf.shape) if n % count == 0 and d != split]
            cure = "Pad it, Shard(..., pad=True)"
            remedy = f"Shard dim {' or '.join(map(str, others))}, or pad" if others else cure
            raise ShapeError(_describe_indivisible(leaf, placement, dim, count, "replicas", remedy))
        return Cut(dim, leaf.shape[dim], axes, split)
    free = [d for d in range(len(leaf.shape)) if d != split]
    longer = {d: math.ceil(leaf.shape[d] / count) * count / leaf.shape[d] for d in free}
    if not free or min(longer.values()) > _MOST_PADDING:
        return None
    columns = 1 if is_match(TABLE, leaf.path) and len(leaf.shape) == 2 else None

    # Without whole tiles, a TPU copies a gathered array into another layout, and its gradient too.
    def has_odd_pieces(dim: int) -> bool:
        return leaf.shape[dim] // count % _TILE[dim == len(leaf.shape) - 1] > 0

    # Prefer least padding, then the columns of a table, then whole tiles, then the largest dim, and
    # then the first dim, so that the choice is deterministic.
    dim = min(free, key=lambda d: (longer[d], d != columns, has_odd_pieces(d), -leaf.shape[d], d))
    return Cut(dim, leaf.shape[dim], axes, split)


def _describe_indivisible(
    leaf: Leaf, placement: Placement, dim: int, count: int, what: str, remedy: str
) -> str:
    size = leaf.shape[dim]
    sizes = [n for n in (size - size % count, size + count - size % count) if n]
    below = max(n for n in range(1, count) if size % n == 0)
    above = next(n for n in range(count + 1, size + 1) if size % n == 0) if size > count else None
    counts = f"{below}" if above is None else f"{below} or {above}"
    return (
        f"{leaf}: {placement!r} needs {count} {what} to divide dim {dim}, which has {size} "
        f"elements.\n\n"
        f"The nearest sizes that {count} divides are {' and '.join(map(str, sizes))}; the nearest "
        f"numbers of {what} that divide {size} are {counts}.\n\n"
        f"{remedy}; or change the size."
    )


def _resolve_names(
    leaf: Leaf, placement: ByNames, layout: ReplicaMesh
) -> Replicate | Split | Shard:
    """Return the placement that `ByNames` gives to the names of a leaf's dims."""
    if not leaf.shape:
        return Replicate()
    if leaf.names is None or len(leaf.names) != len(leaf.shape):
        has = "has no names for its dims" if leaf.names is None else f"names {leaf.names}"
        raise ArgumentError(
            f"{leaf}: the rule is {placement!r}, and the leaf {has}.\n\n"
            "ByNames needs a name for each dim of the leaf.\n\n"
            'Name each dim in its metadata, kernel_metadata={"out_sharding": ("embed", "mlp")}, '
            "or give the leaf a rule with Split, Shard or Replicate."
        )
    over: dict[str, list[int]] = {REPLICA: [], LOGICAL: []}
    axes: tuple[str, ...] | None = None
    for dim, name in enumerate(leaf.names):
        if name is None:
            continue
        if name not in placement.axes:
            raise ArgumentError(
                f"{leaf}: dim {dim} is named {name!r}, and the rule knows "
                f"{sorted(placement.axes)}.\n\n"
                "ByNames has an axis, or None, for every name of a dim.\n\n"
                f"Add it: ByNames({{..., {name!r}: None}})."
            )
        axis = placement.axes[name]
        if axis is None:
            continue
        if axis == REPLICA or axis in layout.replica_axes:
            over[REPLICA].append(dim)
            axes = None if axis == REPLICA else (axis,)
        elif axis == LOGICAL or axis in layout.logical_axes:
            over[LOGICAL].append(dim)
        else:
            raise ArgumentError(
                f"{leaf}: ByNames puts {name!r} on the axis {axis!r}, and the mesh of the strategy "
                f"has {layout.mesh.axis_names}.\n\n"
                'An axis is "replica", "logical", or the name of an axis of the mesh.\n\n'
                f'Use for instance ByNames({{..., {name!r}: "replica"}}).'
            )
    for axis, dims in over.items():
        if len(dims) > 1:
            raise ArgumentError(
                f"{leaf}: ByNames puts the dims {dims}, named {[leaf.names[d] for d in dims]}, on "
                f"the {axis} axis.\n\nAn axis is for one dim of a leaf.\n\n"
                f"Map the others to None: ByNames({{..., {leaf.names[dims[1]]!r}: None}})."
            )
    split = over[LOGICAL][0] if over[LOGICAL] else None
    if over[REPLICA]:
        return Shard(over[REPLICA][0], split, axes)
    return Replicate() if split is None else Split(split)
