"""Resolves placements: returns the sharding of a leaf on a mesh, or an error with a remedy."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.sharding import NamedSharding, PartitionSpec

from jaxdist import cost
from jaxdist._mesh import ReplicaMesh
from jaxdist._values import Cut, find_split_entries
from jaxdist.errors import ArgumentError, ShapeError
from jaxdist.partition._placements import (
    LOGICAL,
    REPLICA,
    STAGE,
    TABLE,
    ByNames,
    Placement,
    Shard,
    Split,
    Stage,
    has_axis,
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


class _Parts(NamedTuple):
    """How one leaf is divided.

    Attributes:
        cut: How the replicas cut it; None if they do not.
        splits: The dims that are split over logical devices, each with the names of its axes.
    """

    cut: Cut | None
    splits: tuple[tuple[int, tuple[str, ...]], ...] = ()

    def insert_dims(self, count: int) -> "_Parts":
        """Return the parts of a stack of such leaves, with `count` more dims in front."""
        cut = None if self.cut is None else self.cut._replace(dim=self.cut.dim + count)
        return _Parts(cut, tuple((dim + count, axes) for dim, axes in self.splits))


def resolve(leaf: Leaf, placement: Placement, layout: ReplicaMesh) -> ResolvedPlacement:
    """Return the sharding of `leaf` by `placement`.

    Raises:
        ShapeError: A dim does not exist, or the devices do not divide it.
        ArgumentError: Axes or names do not exist.
    """
    axes = layout.logical_axes
    if isinstance(placement, Stage):
        parts = _divide_stack(leaf, placement, layout)
    elif leaf.stacked and leaf.shape:
        parts = _divide(_without_stack(leaf, 1), placement, axes, layout).insert_dims(1)
    else:
        parts = _divide(leaf, placement, axes, layout)
    # Cuts of equal layouts are equal.
    pairs = tuple(sorted((dim, axis) for dim, names in parts.splits for axis in names))
    is_one = len(parts.splits) == 1 and parts.splits[0][1] == axes
    split = parts.splits[0][0] if is_one else pairs or None
    if parts.cut is not None:
        cut = parts.cut._replace(split=split)
        return ResolvedPlacement(NamedSharding(layout.mesh, cut.full_spec(layout)), cut)
    entries = find_split_entries(Cut(0, 1, split=split), layout)
    if not entries:
        return ResolvedPlacement(layout.replicated)
    # No spec ends with None: JAX compares specs entry by entry, so equivalent shardings would count
    # as different, and a step would be compiled twice.
    spec = PartitionSpec(*(entries.get(d) for d in range(max(entries) + 1)))
    return ResolvedPlacement(NamedSharding(layout.mesh, spec))


def _without_stack(leaf: Leaf, dims: int) -> Leaf:
    """Return one layer's leaf from that of a stack."""
    names = leaf.names and leaf.names[dims:]
    return dataclasses.replace(leaf, shape=leaf.shape[dims:], names=names, stacked=False)


def _divide(leaf: Leaf, placement: Placement, axes: tuple[str, ...], layout: ReplicaMesh) -> _Parts:
    """Return how a leaf is divided; `axes` are the logical axes over which it may be split."""
    if not leaf.shape:
        return _Parts(None)
    shard: Shard | None = None
    wanted: list[tuple[int, str | None]] = []
    if isinstance(placement, ByNames):
        shard, wanted = _resolve_names(leaf, placement, layout)
    elif isinstance(placement, Split):
        wanted = [(placement.dim, placement.axis)]
    elif isinstance(placement, Shard):
        shard = placement
        wanted = [] if shard.split is None else [(shard.split, shard.split_axis)]
    splits = []
    for dim, axis in wanted:
        own = _resolve_dim(leaf, placement, dim)
        names = tuple(a for a in axes if layout.mesh.shape[a] > 1)
        if axis is not None:
            names = (axis,) if has_axis(str(leaf), placement, axis, axes, layout) else ()
        # The layout over all axes has all names, whatever their sizes are.
        if _is_split(leaf, placement, own, names, layout):
            splits.append((own, axes if axis is None else names))
    cut = None if shard is None else _resolve_cut(leaf, shard, [d for d, _ in splits], layout)
    return _Parts(cut, tuple(splits))


def _divide_stack(leaf: Leaf, stage: Stage, layout: ReplicaMesh) -> _Parts:
    """Return how a stack of layers is divided, whose stages are on the devices of one axis."""
    dims, axis, chunks = stage.num_stack_dims, stage.axis, stage.chunks
    if len(leaf.shape) < dims or (dims == 2 and leaf.shape[0] != chunks):
        raise ShapeError(_describe_no_stack(leaf, stage))
    row = _without_stack(leaf, dims)
    if axis != STAGE or axis in layout.replica_axes:
        is_there = has_axis(str(leaf), stage, axis, layout.logical_axes, layout)
    else:
        is_there = layout.mesh.shape.get(axis, 1) > 1
    if not is_there:
        return _divide(row, stage.of, layout.logical_axes, layout).insert_dims(dims)
    others = tuple(a for a in layout.logical_axes if a != axis)
    parts = _divide(row, stage.of, others, layout).insert_dims(dims)
    count, layers = layout.mesh.shape[axis], leaf.shape[dims - 1] * chunks
    if layers % (count * chunks):
        raise ShapeError(_describe_uneven_stages(leaf, stage, layers, count))
    return parts._replace(splits=((dims - 1, (axis,)), *parts.splits))


def _describe_no_stack(leaf: Leaf, stage: Stage) -> str:
    chunks = stage.chunks
    is_in_chunks = stage.num_stack_dims == 2
    count = (
        f" With chunks={chunks}, dim 0 has {chunks} elements, and dim 1 the layers of each."
        if is_in_chunks
        else ""
    )
    remedy = "Give a scalar the rule partition.Replicate()."
    if leaf.shape:
        layers, *rest = leaf.shape
        new = (chunks, layers // chunks, *rest)
        remedy = f"Reshape the stack: w.reshape({new})."
        if layers % chunks:
            near = [n for n in (layers - layers % chunks, layers + chunks - layers % chunks) if n]
            remedy = (
                f"Use {' or '.join(map(str, near))} layers, and reshape the stack to "
                f"[{chunks}, layers / {chunks}, ...]."
            )
    has = f"dim 0 has {leaf.shape[0]} elements" if leaf.shape else "the leaf is a scalar"
    return (
        f"{leaf}: the rule is {stage!r}, and {has}.\n\n"
        f"Stage is for leaves of all layers, stacked.{count}\n\n{remedy}"
    )


def _describe_uneven_stages(leaf: Leaf, stage: Stage, layers: int, count: int) -> str:
    unit = count * stage.chunks
    near = [n for n in (layers - layers % unit, layers + unit - layers % unit) if n]
    divide = [n for n in range(1, layers + 1) if layers % (n * stage.chunks) == 0]
    each = f"{count} stages" if stage.chunks == 1 else f"{stage.chunks} chunks on {count} stages"
    return (
        f"{leaf}: the rule is {stage!r}, and {each} do not divide {layers} layers.\n\n"
        "Each stage has the same number of layers.\n\n"
        f"Use {' or '.join(map(str, near))} layers, or a number of stages among {divide}."
    )


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


def _is_split(
    leaf: Leaf, placement: Placement, dim: int, axes: tuple[str, ...], layout: ReplicaMesh
) -> bool:
    """Whether a dim is split over axes: they have several devices, and divide it."""
    count = math.prod(layout.mesh.shape[a] for a in axes)
    if count == 1:
        return False
    if leaf.shape[dim] % count == 0:
        return True
    if not getattr(placement, "must_divide", True):
        return False
    others = [d for d, n in enumerate(leaf.shape) if n % count == 0]
    remedy = f"Split dim {' or '.join(map(str, others))}" if others else "Replicate it"
    raise ShapeError(_describe_indivisible(leaf, placement, dim, count, "logical devices", remedy))


def _resolve_cut(
    leaf: Leaf, placement: Shard, splits: Sequence[int], layout: ReplicaMesh
) -> Cut | None:
    """Return how the replicas cut the leaf; None where they do not. `splits` are other dims."""
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
        if dim in splits:
            raise ShapeError(
                f"{leaf}: {placement!r} cuts and splits dim {dim}.\n\n"
                "One dim is cut over the replicas, and another is split over the logical devices."
                "\n\nPass another split, or leave dim out: the largest of the other dims is cut."
            )
        if leaf.shape[dim] % count and not placement.pad:
            others = [d for d, n in enumerate(leaf.shape) if n % count == 0 and d not in splits]
            cure = "Pad it, Shard(..., pad=True)"
            remedy = f"Shard dim {' or '.join(map(str, others))}, or pad" if others else cure
            raise ShapeError(_describe_indivisible(leaf, placement, dim, count, "replicas", remedy))
        return Cut(dim, leaf.shape[dim], axes)
    free = [d for d in range(len(leaf.shape)) if d not in splits]
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
    return Cut(dim, leaf.shape[dim], axes)


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
) -> tuple[Shard | None, list[tuple[int, str | None]]]:
    """Return how `ByNames` cuts a leaf, and the dims that it splits, each with its axis."""
    if leaf.names is None or len(leaf.names) != len(leaf.shape):
        has = "has no names for its dims" if leaf.names is None else f"names {leaf.names}"
        raise ArgumentError(
            f"{leaf}: the rule is {placement!r}, and the leaf {has}.\n\n"
            "ByNames needs a name for each dim of the leaf.\n\n"
            'Name each dim in its metadata, kernel_metadata={"out_sharding": ("embed", "mlp")}, '
            "or give the leaf a rule with Split, Shard or Replicate."
        )
    # For each axis the dims that are on it. All replica axes share one entry.
    over: dict[str, list[int]] = {}
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
            over.setdefault(REPLICA, []).append(dim)
            axes = None if axis == REPLICA else (axis,)
        elif axis == LOGICAL or axis in layout.logical_axes:
            over.setdefault(axis, []).append(dim)
        else:
            raise ArgumentError(
                f"{leaf}: ByNames puts {name!r} on the axis {axis!r}, and the mesh of the strategy "
                f"has {layout.mesh.axis_names}.\n\n"
                'An axis is "replica", "logical", or the name of an axis of the mesh.\n\n'
                f'Use for instance ByNames({{..., {name!r}: "replica"}}).'
            )
    # "logical" takes all logical axes, so no other dim may have one of them.
    if LOGICAL in over:
        for axis in [a for a in over if a not in (REPLICA, LOGICAL)]:
            over[LOGICAL] += over.pop(axis)
    for axis, dims in over.items():
        if len(dims) > 1:
            raise ArgumentError(
                f"{leaf}: ByNames puts the dims {dims}, named {[leaf.names[d] for d in dims]}, on "
                f"the {axis} axis.\n\nAn axis is for one dim of a leaf.\n\n"
                f"Map the others to None: ByNames({{..., {leaf.names[dims[1]]!r}: None}})."
            )
    splits: list[tuple[int, str | None]] = [
        (dim, None if axis == LOGICAL else axis) for axis, [dim] in over.items() if axis != REPLICA
    ]
    shard = Shard(over[REPLICA][0], axes=axes) if REPLICA in over else None
    return shard, splits
