"""Reduce of `IndexedSlices`: the rows of all replicas are concatenated."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxdist._collectives.across.across import gather_across, reduce_across
from jaxdist._collectives.in_replica import all_reduce, gather_over_replicas
from jaxdist._collectives.options.dtypes import result_dtype
from jaxdist._collectives.options.options import CommunicationOptions
from jaxdist._collectives.options.reduce_op import ReduceOp
from jaxdist._mesh import ReplicaMesh
from jaxdist._typing import AxisNames, PyTree
from jaxdist._values import (
    IndexedSlices,
    Kind,
    PerReplica,
    close_containers,
    divide_parts,
    is_container,
    is_mirrored,
    is_sharded,
    open_containers,
    placement_of,
)
from jaxdist.errors import ArgumentTypeError, UnsupportedError


def join_slices(value: Any) -> Any:
    """Return `IndexedSlices` of per-replica parts, if a `PerReplica` has slices on each replica."""
    if isinstance(value, PerReplica) and not value.is_global:
        parts = value.values
        if all(isinstance(p, IndexedSlices) for p in parts):
            first = parts[0]
            return first.with_parts(
                PerReplica([p.values for p in parts]), PerReplica([p.indices for p in parts])
            )
    return value


def reduce_slices_across(
    op: ReduceOp, name: str, slices: IndexedSlices, axis: Any, layout: ReplicaMesh
) -> IndexedSlices:
    """Return `Strategy.reduce` of `IndexedSlices`."""
    if axis is not None:
        raise ArgumentTypeError(
            f"Strategy.reduce was given axis={axis!r} and {name}, which is IndexedSlices.\n\n"
            "The rows of all replicas are concatenated; there is no dim to reduce over.\n\n"
            "Leave axis=None, or reduce slices.to_dense()."
        )
    parts = (("values", slices.values), ("indices", slices.indices))
    if not any(_is_distributed(own, layout) for _, own in parts):
        # The slices are one value for all replicas. `reduce_across` applies the rule for such
        # values: their mean is the value, and a sum raises an error.
        reduce_across(op, name, slices.values, None, layout)
        return slices
    values, indices = (gather_across(f"{name}.{part}", own, 0, layout) for part, own in parts)
    return slices.with_parts(scale_rows(op, values, layout.num_replicas), indices)


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
    caller: str,
    op: ReduceOp,
    value: PyTree,
    layout: ReplicaMesh,
    options: CommunicationOptions,
    ops: Any = None,
) -> PyTree:
    """Return the all-reduce of a pytree that may have `IndexedSlices`."""
    leaves, treedef = jax.tree.flatten(value, is_leaf=_is_opaque_leaf)
    if any(map(is_container, leaves)):
        inner = open_containers(value, "value", is_leaf=_is_opaque_leaf)
        return close_containers(all_reduce_tree(caller, op, inner, layout, options, ops))
    for leaf in leaves:
        refuse_sparse(caller, leaf)
    if not any(map(is_slices, leaves)):
        return all_reduce(caller, op, value, layout, options, ops)
    # One call for all dense leaves, so that they share packs.
    dense = [x for x in leaves if not is_slices(x)]
    reduced = iter(all_reduce(caller, op, dense, layout, options, ops))
    axes, count = layout.replica_axes, layout.num_replicas
    return jax.tree.unflatten(
        treedef,
        [all_reduce_slices(op, x, axes, count) if is_slices(x) else next(reduced) for x in leaves],
    )


def _is_opaque_leaf(x: Any) -> bool:
    """Whether the collective handles `x` itself instead of its leaves."""
    return is_slices(x) or is_sharded(x) or is_sparse(x)


def is_sparse(value: Any) -> bool:
    """Whether `value` is a sparse matrix of JAX, whose parts are leaves of pytrees."""
    return _is_sparse_kind(type(value))


# Every leaf of every collective is checked. The cache makes that one lookup of its type. The module
# is compared by name, so that jaxdist need not import `jax.experimental.sparse`.
@functools.lru_cache(maxsize=256)
def _is_sparse_kind(kind: type) -> bool:
    """Whether a type is one of `jax.experimental.sparse`."""
    return kind.__module__.startswith("jax.experimental.sparse") and hasattr(kind, "todense")


def refuse_sparse(caller: str, value: Any) -> None:
    """Refuse a sparse matrix of JAX, whose indices would be combined like its numbers.

    Raises:
        UnsupportedError: It is one.
    """
    if is_sparse(value):
        kind = type(value).__name__
        raise UnsupportedError(
            f"{caller} was given a {kind}: {value!r}.\n\n"
            "Its indices are arrays like its numbers, and would be combined with those of other "
            "replicas.\n\n"
            "Pass jaxdist.IndexedSlices(value.data, value.indices[:, 0], value.shape) for rows; "
            f"value.todense(); or value.data alone, where the {kind}s of all replicas have the "
            "same indices."
        )


def refuse_slices(caller: str, name: str, value: Any) -> None:
    """Refuse `IndexedSlices` where whole arrays are concatenated.

    Raises:
        UnsupportedError: It is `IndexedSlices`, or a `PerReplica` of them, or a sparse matrix.
    """
    refuse_sparse(caller, value)
    if is_slices(join_slices(value)):
        raise UnsupportedError(
            f"{caller} was given {name}, which is IndexedSlices.\n\n"
            "IndexedSlices of all replicas, concatenated, mean the sum of the arrays, and not the "
            "arrays one after the other.\n\n"
            "Gather the arrays: slices.to_dense(). For the sum use reduce('SUM', slices); for the "
            "rows themselves gather slices.values and slices.indices."
        )


def is_slices(value: Any) -> bool:
    """Whether `value` is `IndexedSlices`, so that flattening keeps rows and indices together."""
    return isinstance(value, IndexedSlices)


def _is_distributed(value: Any, layout: ReplicaMesh) -> bool:
    """Whether replicas have a value, each its own or all the same."""
    if isinstance(value, PerReplica) or is_mirrored(value, layout):
        return True
    return isinstance(value, jax.Array) and placement_of(value, layout).kind is Kind.PER_REPLICA


def scale_rows(op: ReduceOp, values: jax.Array, count: int) -> jax.Array:
    """Return rows in the dtype of their sum or mean; for a mean, divided by `count` replicas."""
    rows = values.astype(result_dtype(op, values.dtype))
    return divide_parts(rows, count) if op is ReduceOp.MEAN else rows
