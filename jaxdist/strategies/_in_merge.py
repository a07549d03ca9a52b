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
from jaxdist.replica import own_value
from jaxdist.values import PerReplica


def reduce(op: ReduceOp, value: PyTree, axis: Any, layout: ReplicaMesh) -> PyTree:
    """`Strategy.reduce` on handles: a `psum`."""

    def leaf_of(path: Any, leaf: Any) -> Any:
        name = "value" + keystr(path)
        if collectives.is_slices(leaf):
            own = jax.tree.map(
                lambda x: own_value(x, layout) if isinstance(x, PerReplica) else x,
                leaf,
                is_leaf=_is_per_replica,
            )
            count = layout.num_replicas
            return collectives.all_reduce_slices(op, own, layout.replica_axes, count)
        # A traced value that the function closed over may differ between replicas like any other.
        if not isinstance(leaf, (PerReplica, jax.core.Tracer)):
            return collectives.reduce_across(op, name, leaf, axis, layout)
        local = own_value(leaf, layout) if isinstance(leaf, PerReplica) else leaf
        collectives.check_numeric("Strategy.reduce", name, local)
        if axis is not None:
            dims = collectives.reduced_dims(name, local, axis)
            dtype = collectives.result_dtype(op, local.dtype)
            if op is ReduceOp.MEAN:
                local = jnp.mean(local, axis=dims).astype(dtype)
            else:
                local = jnp.sum(local, axis=dims, dtype=dtype)
        return collectives.all_reduce(
            "Strategy.reduce", op, local, layout.replica_axes, layout.num_replicas
        )

    return jax.tree.map_with_path(
        leaf_of, value, is_leaf=lambda x: _is_per_replica(x) or collectives.is_slices(x)
    )


def gather(value: PyTree, axis: int, layout: ReplicaMesh) -> PyTree:
    """`Strategy.gather` on handles: an all-gather."""

    def leaf_of(path: Any, leaf: Any) -> Any:
        if not isinstance(leaf, PerReplica):
            return leaf
        local = jnp.asarray(own_value(leaf, layout))
        dim = collectives.gather_dim("Strategy.gather", "value" + keystr(path), local, axis)
        return collectives.gathered(local, dim, layout.replica_axes)

    return jax.tree.map_with_path(leaf_of, value, is_leaf=_is_per_replica)


def broadcast(value: PyTree) -> PyTree:
    """Every replica gets the value, which has to be one value and not one for each replica."""

    def leaf_of(path: Any, leaf: Any) -> Any:
        if isinstance(leaf, PerReplica):
            raise ArgumentTypeError(
                f"broadcast_to was given value{keystr(path)}, which is a PerReplica.\n\n"
                "It has a value for each replica already.\n\n"
                "Reduce it first: strategy.reduce('MEAN', value, axis=None)."
            )
        return leaf

    return jax.tree.map_with_path(leaf_of, value, is_leaf=_is_per_replica)


def _is_per_replica(x: Any) -> bool:
    return isinstance(x, PerReplica)
