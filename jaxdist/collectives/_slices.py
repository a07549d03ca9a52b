"""Reducing rows of an array: those of all replicas, one after the other."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxdist._typing import AxisNames, PyTree
from jaxdist.collectives._across import gather_across, reduce_across
from jaxdist.collectives._dtypes import result_dtype
from jaxdist.collectives._in_replica import all_reduce, gathered
from jaxdist.collectives._options import CommunicationOptions
from jaxdist.collectives._reduce_op import ReduceOp
from jaxdist.errors import ArgumentTypeError
from jaxdist.mesh import ReplicaMesh
from jaxdist.values import IndexedSlices, Kind, PerReplica, is_mirrored, is_sharded, placement_of


def slices_of_all(value: Any) -> Any:
    """`IndexedSlices` of per-replica parts, where a `PerReplica` has slices for each replica."""
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
    """`Strategy.reduce` of rows that each replica has."""
    if axis is not None:
        raise ArgumentTypeError(
            f"Strategy.reduce was given axis={axis!r} and {name}, which is IndexedSlices.\n\n"
            "Rows of all replicas are put one after the other; there is no dim to reduce over.\n\n"
            "Leave axis=None, or reduce slices.to_dense()."
        )
    parts = (("values", slices.values), ("indices", slices.indices))
    if not any(_is_distributed(own, layout) for _, own in parts):
        # One value: a mean gives it back, a sum is refused.
        reduce_across(op, name, slices.values, None, layout)
        return slices
    values, indices = (gather_across(f"{name}.{part}", own, 0, layout) for part, own in parts)
    return slices.with_parts(scaled(op, values, layout.num_replicas), indices)


def all_reduce_slices(
    op: ReduceOp, slices: IndexedSlices, axes: AxisNames, num_replicas: int
) -> IndexedSlices:
    """The rows of all replicas, as seen from inside a step; two all-gathers."""
    values, indices = jnp.asarray(slices.values), jnp.asarray(slices.indices)
    if num_replicas > 1:
        values, indices = gathered(values, 0, axes), gathered(indices, 0, axes)
    return slices.with_parts(scaled(op, values, num_replicas), indices)


def all_reduce_tree(
    caller: str,
    op: ReduceOp,
    value: PyTree,
    layout: ReplicaMesh,
    options: CommunicationOptions,
    ops: Any = None,
) -> PyTree:
    """`all_reduce` of a pytree in which there may be `IndexedSlices`."""
    leaves, treedef = jax.tree.flatten(value, is_leaf=lambda x: is_slices(x) or is_sharded(x))
    if not any(map(is_slices, leaves)):
        return all_reduce(caller, op, value, layout, options, ops)
    dense = [x for x in leaves if not is_slices(x)]
    reduced = iter(all_reduce(caller, op, dense, layout, options, ops))
    axes, count = layout.replica_axes, layout.num_replicas
    return jax.tree.unflatten(
        treedef,
        [all_reduce_slices(op, x, axes, count) if is_slices(x) else next(reduced) for x in leaves],
    )


def is_slices(value: Any) -> bool:
    """Whether flattening stops at `value`, to keep its rows and their numbers together."""
    return isinstance(value, IndexedSlices)


def _is_distributed(value: Any, layout: ReplicaMesh) -> bool:
    if isinstance(value, PerReplica) or is_mirrored(value, layout):
        return True
    return isinstance(value, jax.Array) and placement_of(value, layout).kind is Kind.PER_REPLICA


def scaled(op: ReduceOp, values: jax.Array, count: int) -> jax.Array:
    """Rows of `count` replicas, in the dtype of their sum or mean, divided for a mean."""
    rows = values.astype(result_dtype(op, values.dtype))
    return rows / count if op is ReduceOp.MEAN else rows
