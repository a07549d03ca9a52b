"""Reduce of `IndexedSlices`: the rows of all replicas are concatenated."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxdist._called import call_as, refuse_type
from jaxdist._collectives.across.gather import gather_across
from jaxdist._collectives.across.kinds import (
    Function,
    Request,
    ValueKind,
    refuse_sparse,
)
from jaxdist._collectives.across.reduce import (
    reduce_list,
    reduce_one,
    reduce_rows,
    reduce_sharded,
)
from jaxdist._collectives.in_replica import all_reduce, gather_over_replicas
from jaxdist._collectives.options import CommunicationOptions
from jaxdist._collectives.reduction import ReduceOp, reduce_one_value, result_dtype
from jaxdist._mesh import ReplicaMesh
from jaxdist._typing import AxisNames, PyTree
from jaxdist._values import (
    IndexedSlices,
    Kind,
    PerReplica,
    Stop,
    close_containers,
    divide_parts,
    is_container,
    is_mirrored,
    is_slices,
    open_containers,
    placement_of,
    stops,
)


def reduce_slices(request: Request, name: str, slices: IndexedSlices) -> IndexedSlices:
    """Reduce `IndexedSlices` outside of a step."""
    if request.axis is not None:
        raise call_as(
            "Strategy.reduce",
            refuse_type,
            f"axis={request.axis!r} and {name}, which is IndexedSlices.",
            "The rows of all replicas are concatenated; there is no dim to reduce over.",
            "Leave axis=None, or reduce slices.to_dense().",
        )
    parts = (("values", slices.values), ("indices", slices.indices))
    if not any(_is_distributed(own, request.layout) for _, own in parts):
        # The slices are one value for all replicas. The rule for such values applies: their mean
        # is the value, and a sum raises an error.
        values = reduce_one(request, name, slices.values)
        return slices if values is slices.values else slices.with_parts(values, slices.indices)
    rows = Request(0, request.layout)
    values, indices = (
        call_as("Strategy.gather", gather_across, rows, f"{name}.{part}", own)
        for part, own in parts
    )
    scaled = scale_rows(request.op, values, request.layout.num_replicas)
    return slices.with_parts(scaled, indices)


def all_reduce_slices(
    op: ReduceOp, slices: IndexedSlices, axes: AxisNames, num_replicas: int
) -> IndexedSlices:
    """Return the rows of all replicas, inside a step; costs two all-gathers."""
    values, indices = jnp.asarray(slices.values), jnp.asarray(slices.indices)
    if num_replicas > 1:
        values, indices = (
            gather_over_replicas(values, 0, axes),
            gather_over_replicas(indices, 0, axes),
        )
    return slices.with_parts(scale_rows(op, values, num_replicas), indices)


def all_reduce_tree(
    op: ReduceOp,
    value: PyTree,
    layout: ReplicaMesh,
    options: CommunicationOptions,
    ops: Any = None,
) -> PyTree:
    """Return the all-reduce of a pytree that may have `IndexedSlices`."""
    leaves, treedef = jax.tree.flatten(value, is_leaf=stops(Stop.REDUCED_IN_STEP))
    if any(map(is_container, leaves)):
        inner = open_containers(value, "value", is_leaf=stops(Stop.REDUCED_IN_STEP))
        return close_containers(all_reduce_tree(op, inner, layout, options, ops))
    for leaf in leaves:
        refuse_sparse(leaf)
    if not any(map(is_slices, leaves)):
        return all_reduce(op, value, layout, options, ops)
    # One call for all dense leaves, so that they share packs.
    dense = [x for x in leaves if not is_slices(x)]
    reduced = iter(all_reduce(op, dense, layout, options, ops))
    axes, count = layout.replica_axes, layout.num_replicas
    return jax.tree.unflatten(
        treedef,
        [all_reduce_slices(op, x, axes, count) if is_slices(x) else next(reduced) for x in leaves],
    )


def reduce_tree_of_one(op: ReduceOp, value: PyTree) -> PyTree:
    """Return the all-reduce of a pytree where there is one replica and no step."""

    def reduce(leaf: Any) -> Any:
        if not is_slices(leaf):
            return reduce_one_value(op, leaf)
        return leaf.with_parts(reduce_one_value(op, leaf.values), leaf.indices)

    return jax.tree.map(reduce, value, is_leaf=is_slices)


def _is_distributed(value: Any, layout: ReplicaMesh) -> bool:
    """Whether a value is that of the replicas: one for each, or one for all."""
    if isinstance(value, PerReplica) or is_mirrored(value, layout):
        return True
    return isinstance(value, jax.Array) and placement_of(value, layout).kind is Kind.PER_REPLICA


def scale_rows(op: ReduceOp, values: jax.Array, count: int) -> jax.Array:
    """Return rows in the dtype of their sum or mean; for a mean, divided by `count` replicas."""
    rows = values.astype(result_dtype(op, values.dtype))
    return divide_parts(rows, count) if op is ReduceOp.MEAN else rows


# One column of the table; see Note [Kinds and contexts].
REDUCE: Mapping[ValueKind, Function] = {
    ValueKind.HELD: reduce_rows,
    ValueKind.ROWS: reduce_rows,
    ValueKind.LIST: reduce_list,
    ValueKind.TRACED_VALUES: reduce_rows,
    ValueKind.TRACED: reduce_one,
    ValueKind.SHARDED: reduce_sharded,
    ValueKind.SLICES: reduce_slices,
    ValueKind.ONE: reduce_one,
}
