"""`Strategy.reduce` and `Strategy.gather` outside of a step, on concrete arrays."""

from typing import Any

import jax
from jax.tree_util import keystr

from jaxdist import _collectives
from jaxdist._collectives import Communication, CommunicationOptions, CrossDeviceOps, ReduceOp
from jaxdist._mesh import ReplicaMesh
from jaxdist._strategies.across.by_ops import OpsReducer
from jaxdist._typing import PyTree
from jaxdist._values import PerReplica, Sharded, close_containers, is_container, open_containers


def reduce(
    op: ReduceOp,
    value: PyTree,
    axis: Any,
    layout: ReplicaMesh,
    communication: Communication,
    options: CommunicationOptions,
) -> PyTree:
    """Reduce the values of all replicas, with the user's `CrossDeviceOps` if there are any."""
    ops = communication.ops
    value = _collectives.join_slices(value)
    # One `PerReplica` is the common case (a loss): it skips the pytree functions below.
    if isinstance(value, PerReplica) and ops is None:
        return _collectives.reduce_across(op, "value", value, axis, layout)
    leaves, treedef = jax.tree.flatten_with_path(value, is_leaf=_is_leaf)
    if any(is_container(leaf) for _, leaf in leaves):
        inner = open_containers(value, "value", is_leaf=_is_leaf)
        return close_containers(reduce(op, inner, axis, layout, communication, options))
    named = {"value" + keystr(path): _collectives.join_slices(leaf) for path, leaf in leaves}
    # All leaves are checked before the first one is reduced, so that an error names all of them.
    for leaf in named.values():
        _collectives.refuse_sparse("Strategy.reduce", leaf)
    _collectives.check_reducible(named, axis)
    found: dict[str, Any] = {}
    if ops is not None:
        by_ops = OpsReducer(ops, layout, options)
        theirs = {n: leaf for n, leaf in named.items() if by_ops.can_reduce(leaf)}
        if theirs:
            found = dict(zip(theirs, by_ops.reduce(op, theirs, axis), strict=True))
    return treedef.unflatten(
        found[n] if n in found else _reduce_leaf(op, n, leaf, axis, layout)
        for n, leaf in named.items()
    )


def _reduce_leaf(op: ReduceOp, name: str, leaf: Any, axis: Any, layout: ReplicaMesh) -> Any:
    if _collectives.is_slices(leaf):
        return _collectives.reduce_slices_across(op, name, leaf, axis, layout)
    if isinstance(leaf, Sharded):
        return _collectives.reduce_sharded(op, name, leaf, axis)
    return _collectives.reduce_across(op, name, leaf, axis, layout)


def gather(
    value: PyTree,
    axis: int,
    layout: ReplicaMesh,
    own: CrossDeviceOps | None,
    options: CommunicationOptions,
) -> PyTree:
    """Concatenate the values of all replicas, by `own.gather_implementation` if `own` is given."""
    if isinstance(value, PerReplica) and own is None:
        _collectives.refuse_slices("Strategy.gather", "value", value)
        return _collectives.gather_across("value", value, axis, layout)
    leaves, treedef = jax.tree.flatten_with_path(value, is_leaf=_is_leaf)
    if any(is_container(leaf) for _, leaf in leaves):
        inner = open_containers(value, "value", is_leaf=_is_leaf)
        return close_containers(gather(inner, axis, layout, own, options))
    named = {"value" + keystr(path): leaf for path, leaf in leaves}
    for name, leaf in named.items():
        _collectives.refuse_slices("Strategy.gather", name, leaf)
    _collectives.check_gatherable("Strategy.gather", named, axis)
    # Leaves that are no per-replica values do not concern the user's class.
    by_ops = None if own is None else OpsReducer(own, layout, options)

    def gather_leaf(name: str, leaf: Any) -> Any:
        if isinstance(leaf, Sharded):
            return _collectives.gather_sharded(name, leaf, axis)
        if by_ops is not None and by_ops.can_reduce(leaf):
            return by_ops.gather(name, leaf, axis)
        return _collectives.gather_across(name, leaf, axis, layout)

    return treedef.unflatten(gather_leaf(name, leaf) for name, leaf in named.items())


def _is_leaf(x: Any) -> bool:
    if isinstance(x, (PerReplica, Sharded)):
        return True
    return _collectives.is_slices(x) or _collectives.is_sparse(x)
