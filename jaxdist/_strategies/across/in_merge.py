"""Methods of a strategy inside a merge function, on traced values.

# Note [Merge functions]
`ReplicaContext.merge_call` calls a merge function in the cross-replica context while the step is
traced. TensorFlow waits there until all replicas have arrived. jaxdist traces the step as one
replica sees it, so no replica waits: a per-replica value is a `Handle`, which holds the traced
value of that replica. `Strategy.reduce` and `gather` then become collectives over the replica axes
of the same program, and `Strategy.run` calls its function directly. Outside of a step the same
methods work on concrete arrays. `calls.py` has the functions for both.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import keystr

from jaxdist import _collectives
from jaxdist._called import called, refuse_type
from jaxdist._collectives import ReduceOp, Request
from jaxdist._mesh import ReplicaMesh
from jaxdist._replica import Frame, HasLayout, ReplicaContext, enter_frame
from jaxdist._typing import PyTree
from jaxdist._values import (
    Handle,
    PerReplica,
    as_handles,
    get_own_value,
    get_own_values,
    is_per_replica,
)


def run(
    strategy: HasLayout,
    frame: Frame,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
) -> PyTree:
    """Run `fn` as `Strategy.run` does: on this replica's values; return its arrays as handles."""
    layout: ReplicaMesh = strategy.layout
    own_args, own_kwargs = get_own_values((tuple(args), dict(kwargs or {})), layout)
    # The surrounding step also collects the variables that are read and assigned here.
    context = ReplicaContext(strategy)
    with enter_frame(Frame(strategy, replica=context, variables=frame.variables)):
        result = fn(*own_args, **own_kwargs)
    return as_handles(result, layout)


def reduce_own_values(request: Request, named: dict[str, Any]) -> list[Any]:
    """Reduce the values of this replica in one call, so that small leaves share an all-reduce."""
    own = get_own_values(list(named.values()), request.layout)
    given = [_reduce_dims(request, name, local) for name, local in zip(named, own, strict=True)]
    return _collectives.all_reduce(request.op, given, request.layout, request.options, request.ops)


def _reduce_dims(request: Request, name: str, local: Any) -> Any:
    """Reduce dims of the value of one replica."""
    op, axis = request.op, request.axis
    _collectives.check_numeric(name, local)
    if axis is None:
        return local
    dims = _collectives.find_reduced_dims(name, local, axis)
    dtype = _collectives.result_dtype(op, local.dtype)
    if op is ReduceOp.MEAN:
        return jnp.mean(local, axis=dims).astype(dtype)
    return jnp.sum(local, axis=dims, dtype=dtype)


def reduce_slices(request: Request, _: str, leaf: Any) -> Any:
    """Concatenate the rows of `IndexedSlices` of all replicas."""
    layout = request.layout
    own = get_own_values(leaf, layout)
    return _collectives.all_reduce_slices(request.op, own, layout.replica_axes, layout.num_replicas)


def gather_own_value(request: Request, name: str, leaf: PerReplica) -> Any:
    """Gather a handle by an all-gather or by the user's `CrossDeviceOps`."""
    layout, axis = request.layout, request.axis
    local = jnp.asarray(get_own_value(leaf, layout))
    if request.ops is not None:
        handle = Handle(local, layout)
        return _collectives.gather_by_ops(request.ops, name, handle, axis, layout, request.options)
    dim = _collectives.gather_dim(name, local, axis)
    return _collectives.gather_over_replicas(local, dim, layout.replica_axes)


def keep(_: Request, __: str, leaf: Any) -> Any:
    """Return the leaf unchanged: every replica has it already."""
    return leaf


def broadcast(value: PyTree) -> PyTree:
    """Return the value for every replica; raise an error for a `PerReplica`."""

    @called("broadcast_to")
    def check_leaf(path: Any, leaf: Any) -> Any:
        if isinstance(leaf, PerReplica):
            raise refuse_type(
                f"tensor{keystr(path)}, which is a PerReplica.",
                "It has a value for each replica already.",
                "Reduce it first: strategy.reduce('MEAN', value, axis=None).",
            )
        return leaf

    return jax.tree.map_with_path(check_leaf, value, is_leaf=is_per_replica)
