"""`Strategy.reduce` and `Strategy.gather` outside of a step, on arrays that are there."""

from typing import Any

import jax
from jax.tree_util import keystr

from jaxdist import collectives
from jaxdist._typing import PyTree
from jaxdist.collectives import Communication, CommunicationOptions, CrossDeviceOps, ReduceOp
from jaxdist.mesh import ReplicaMesh
from jaxdist.strategies._by_ops import ReducedByOps
from jaxdist.values import PerReplica, Sharded


def reduce(
    op: ReduceOp,
    value: PyTree,
    axis: Any,
    layout: ReplicaMesh,
    communication: Communication,
    options: CommunicationOptions,
) -> PyTree:
    """Combine the values of all replicas, by the strategy's own `CrossDeviceOps` if it has any."""
    ops = communication.ops
    value = collectives.slices_of_all(value)
    if isinstance(value, PerReplica) and ops is None:
        return collectives.reduce_across(op, "value", value, axis, layout)
    leaves, treedef = jax.tree.flatten_with_path(value, is_leaf=_is_reduced_whole)
    named = {"value" + keystr(path): collectives.slices_of_all(leaf) for path, leaf in leaves}
    collectives.check_reducible(named, axis)
    found: dict[str, Any] = {}
    if ops is not None:
        by_ops = ReducedByOps(ops, layout, options)
        theirs = {n: leaf for n, leaf in named.items() if by_ops.takes(leaf)}
        if theirs:
            found = dict(zip(theirs, by_ops.reduce(op, theirs, axis), strict=True))
    return treedef.unflatten(
        found[n] if n in found else _reduced(op, n, leaf, axis, layout) for n, leaf in named.items()
    )


def _reduced(op: ReduceOp, name: str, leaf: Any, axis: Any, layout: ReplicaMesh) -> Any:
    if collectives.is_slices(leaf):
        return collectives.reduce_slices_across(op, name, leaf, axis, layout)
    if isinstance(leaf, Sharded):
        return collectives.reduce_sharded(op, name, leaf, axis)
    return collectives.reduce_across(op, name, leaf, axis, layout)


def gather(
    value: PyTree,
    axis: int,
    layout: ReplicaMesh,
    own: CrossDeviceOps | None,
    options: CommunicationOptions,
) -> PyTree:
    """Concatenate the values of all replicas, by a class of the user's own if there is one."""
    if isinstance(value, PerReplica) and own is None:
        return collectives.gather_across("value", value, axis, layout)
    leaves, treedef = jax.tree.flatten_with_path(value, is_leaf=_is_gathered_whole)
    named = {"value" + keystr(path): leaf for path, leaf in leaves}
    collectives.check_gatherable("Strategy.gather", named, axis)
    by_ops = None if own is None else ReducedByOps(own, layout, options)

    def gathered(name: str, leaf: Any) -> Any:
        if isinstance(leaf, Sharded):
            return collectives.gather_sharded(name, leaf, axis)
        if by_ops is not None and by_ops.takes(leaf):
            return by_ops.gather(name, leaf, axis)
        return collectives.gather_across(name, leaf, axis, layout)

    return treedef.unflatten(gathered(name, leaf) for name, leaf in named.items())


def _is_reduced_whole(x: Any) -> bool:
    return _is_gathered_whole(x) or collectives.is_slices(x)


def _is_gathered_whole(x: Any) -> bool:
    return isinstance(x, (PerReplica, Sharded))
