"""Reducing and gathering inside a merge function, where every value is a traced handle."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import keystr

from jaxdist import collectives
from jaxdist._typing import PyTree
from jaxdist.collectives import ReduceOp
from jaxdist.errors import ArgumentTypeError
from jaxdist.mesh import ReplicaMesh
from jaxdist.replica import Handle


def reduce(op: ReduceOp, value: PyTree, axis: Any, layout: ReplicaMesh) -> PyTree:
    """`Strategy.reduce` on handles: a `psum`."""

    def leaf_of(path: Any, leaf: Any) -> Any:
        name = "value" + keystr(path)
        if not isinstance(leaf, Handle):
            return collectives.reduce_across(op, name, leaf, axis, layout)
        local = leaf.local
        if axis is not None:
            collectives.check_numeric("Strategy.reduce", name, local)
            total = jnp.sum(local, axis=axis, dtype=collectives.result_dtype(op, local.dtype))
            count = local.size // max(total.size, 1)
            if op is ReduceOp.MEAN:
                local = total / jnp.asarray(count, total.dtype)
            else:
                local = total
        return collectives.all_reduce(
            "Strategy.reduce", op, local, layout.replica_axes, layout.num_replicas
        )

    return jax.tree.map_with_path(leaf_of, value, is_leaf=_is_handle)


def gather(value: PyTree, axis: int, layout: ReplicaMesh) -> PyTree:
    """`Strategy.gather` on handles: an all-gather."""

    def leaf_of(leaf: Any) -> Any:
        if not isinstance(leaf, Handle):
            return leaf
        return collectives.all_gather("Strategy.gather", leaf.local, axis, layout.replica_axes)

    return jax.tree.map(leaf_of, value, is_leaf=_is_handle)


def broadcast(value: PyTree) -> PyTree:
    """Every replica gets the value, which has to be one value and not one for each replica."""

    def leaf_of(path: Any, leaf: Any) -> Any:
        if isinstance(leaf, Handle):
            raise ArgumentTypeError(
                f"broadcast_to was given value{keystr(path)}, which is a PerReplica.\n\n"
                "It has a value for each replica already.\n\n"
                "Reduce it first: strategy.reduce('MEAN', value, axis=None)."
            )
        return leaf

    return jax.tree.map_with_path(leaf_of, value, is_leaf=_is_handle)


def _is_handle(x: Any) -> bool:
    return isinstance(x, Handle)
