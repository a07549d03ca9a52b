"""Methods of a strategy inside a merge function, on traced values.

# Note [Merge functions]
`ReplicaContext.merge_call` calls a merge function in the cross-replica context while the step is
traced. TensorFlow waits there until all replicas have arrived. jaxdist traces the step as one
replica sees it, so no replica waits: a per-replica value is a `Handle`, which holds the traced
value of that replica. `Strategy.reduce` and `gather` then become collectives over the replica axes
of the same program, and `Strategy.run` calls its function directly. Outside of a step the same
methods work on concrete arrays (`reduce_and_gather.py`). `Frame.in_merge` selects between the two.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import keystr

from jaxdist import _collectives
from jaxdist._collectives import Communication, CommunicationOptions, CrossDeviceOps, ReduceOp
from jaxdist._mesh import ReplicaMesh
from jaxdist._replica import Frame, ReplicaContext, enter_frame
from jaxdist._typing import PyTree
from jaxdist._values import DistributedValues, Handle, PerReplica, get_own_value
from jaxdist.errors import ArgumentTypeError


def run(
    strategy: Any,
    frame: Frame,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
) -> PyTree:
    """Call `fn` with this replica's values, and return its arrays as handles: `Strategy.run`."""
    layout: ReplicaMesh = strategy.layout
    own_args, own_kwargs = jax.tree.map(
        lambda x: get_own_value(x, layout) if _is_per_replica(x) else x,
        (tuple(args), dict(kwargs or {})),
        is_leaf=lambda x: isinstance(x, DistributedValues),
    )
    # The surrounding step collects the variables that are read and assigned here, too.
    context = ReplicaContext(strategy)
    with enter_frame(Frame(strategy, replica=context, variables=frame.variables)):
        result = fn(*own_args, **own_kwargs)
    return jax.tree.map(
        lambda x: Handle(x, layout) if isinstance(x, jax.core.Tracer) else x,
        result,
        is_leaf=lambda x: isinstance(x, DistributedValues),
    )


def reduce(
    op: ReduceOp,
    value: PyTree,
    axis: Any,
    layout: ReplicaMesh,
    communication: Communication,
    options: CommunicationOptions,
) -> PyTree:
    """Reduce handles by one all-reduce of all leaves: `Strategy.reduce`."""
    leaves, treedef = jax.tree.flatten_with_path(
        value, is_leaf=lambda x: _is_per_replica(x) or _collectives.is_slices(x)
    )
    results: list[Any] = []
    local: dict[int, Any] = {}
    for number, (path, leaf) in enumerate(leaves):
        name = "value" + keystr(path)
        results.append(leaf)
        if _collectives.is_slices(leaf):
            results[number] = _reduce_slices(op, leaf, layout)
        # A concrete array is equal on all replicas. A traced value that the function closes over
        # may differ between them, so it is reduced like a handle.
        elif not isinstance(leaf, (PerReplica, jax.core.Tracer)):
            results[number] = _collectives.reduce_across(op, name, leaf, axis, layout)
        else:
            own = get_own_value(leaf, layout) if isinstance(leaf, PerReplica) else leaf
            local[number] = _reduce_dims(op, name, own, axis)
    # One call for all leaves, so that small leaves share a collective.
    if local:
        caller = "Strategy.reduce"
        given = list(local.values())
        sums = _collectives.all_reduce(caller, op, given, layout, options, communication.ops)
        for number, total in zip(local, sums, strict=True):
            results[number] = total
    return jax.tree.unflatten(treedef, results)


def _reduce_dims(op: ReduceOp, name: str, local: Any, axis: Any) -> Any:
    """Reduce dims of the value of one replica."""
    _collectives.check_numeric("Strategy.reduce", name, local)
    if axis is None:
        return local
    dims = _collectives.find_reduced_dims(name, local, axis)
    dtype = _collectives.result_dtype(op, local.dtype)
    if op is ReduceOp.MEAN:
        return jnp.mean(local, axis=dims).astype(dtype)
    return jnp.sum(local, axis=dims, dtype=dtype)


def _reduce_slices(op: ReduceOp, leaf: Any, layout: ReplicaMesh) -> Any:
    own = jax.tree.map(
        lambda x: get_own_value(x, layout) if isinstance(x, PerReplica) else x,
        leaf,
        is_leaf=_is_per_replica,
    )
    return _collectives.all_reduce_slices(op, own, layout.replica_axes, layout.num_replicas)


def gather(
    value: PyTree,
    axis: int,
    layout: ReplicaMesh,
    own: CrossDeviceOps | None,
    options: CommunicationOptions,
) -> PyTree:
    """Gather handles by an all-gather or by the user's `CrossDeviceOps`: `Strategy.gather`."""

    def gather_leaf(path: Any, leaf: Any) -> Any:
        name = "value" + keystr(path)
        _collectives.refuse_slices("Strategy.gather", name, leaf)
        if not isinstance(leaf, PerReplica):
            return leaf
        if own is not None:
            handle = Handle(jnp.asarray(get_own_value(leaf, layout)), layout)
            return _collectives.gather_by_ops(own, name, handle, axis, layout, options)
        local = jnp.asarray(get_own_value(leaf, layout))
        dim = _collectives.gather_dim("Strategy.gather", name, local, axis)
        return _collectives.gather_over_replicas(local, dim, layout.replica_axes)

    return jax.tree.map_with_path(gather_leaf, value, is_leaf=_is_leaf)


def _is_leaf(x: Any) -> bool:
    return _is_per_replica(x) or _collectives.is_slices(x) or _collectives.is_sparse(x)


def broadcast(value: PyTree) -> PyTree:
    """Return the value for every replica; raise an error for a `PerReplica`."""

    def check_leaf(path: Any, leaf: Any) -> Any:
        if isinstance(leaf, PerReplica):
            raise ArgumentTypeError(
                f"broadcast_to was given tensor{keystr(path)}, which is a PerReplica.\n\n"
                "It has a value for each replica already.\n\n"
                "Reduce it first: strategy.reduce('MEAN', value, axis=None)."
            )
        return leaf

    return jax.tree.map_with_path(check_leaf, value, is_leaf=_is_per_replica)


def _is_per_replica(x: Any) -> bool:
    return isinstance(x, PerReplica)
