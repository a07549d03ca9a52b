"""Makes the sharded initial state of `sharded_update`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding

from jaxdist import _compat
from jaxdist._called import called
from jaxdist._mesh import ReplicaMesh
from jaxdist._typing import PyTree
from jaxdist._update.leaves import Cuts, Leaves
from jaxdist._update.values import Whole
from jaxdist._values import (
    Cut,
    Sharded,
    Stop,
    copy_if_writable,
    cut_and_place,
    is_of_this_process,
    make_equal,
    pad_dim,
    placement_of,
    put,
    stops,
    view_auto,
    whole_array,
)


def shard_in_step(state: PyTree, layout: ReplicaMesh, cuts: Cuts) -> PyTree:
    """Shard a state that was made inside a step; each replica keeps its pieces."""
    leaves = Leaves.flatten(state, "state")
    new_leaves = []
    for array, name, path in zip(leaves.arrays, leaves.names, leaves.paths, strict=True):
        cut = None if isinstance(array, Sharded) else cuts.cut_of_leaf(array, path)
        if cut is not None:
            array = Sharded(Whole(array, layout, name).piece(cut), *cut)
        new_leaves.append(array)
    return leaves.rebuild(new_leaves)


@_compat.outside_of_meshes
def shard_outside(state: PyTree, layout: ReplicaMesh, cuts: Cuts) -> PyTree:
    """Shard a state of any layout over the replicas of one strategy."""
    leaves = Leaves.flatten(state, "state")
    equal = _make_equal(leaves, layout)
    new_leaves = []
    for array, path in zip(equal, leaves.paths, strict=True):
        whole = whole_array(array)
        cut = cuts.cut_of_leaf(whole, path)
        new_leaves.append(
            put(copy_if_writable(whole), layout.replicated)
            if cut is None
            else cut_and_place(whole, cut, layout)
        )
    return leaves.rebuild(new_leaves)


@_compat.outside_of_meshes
def init_outside(
    init: Callable[[PyTree], PyTree], params: PyTree, layout: ReplicaMesh, cuts: Cuts
) -> PyTree:
    """Compute the state that `init` makes in pieces, so that no device ever holds all of it."""
    given = Leaves.flatten(params, "params")
    new_leaves: list[Leaves] = []
    found_cuts: list[Cut | None] = []

    def flat(*arrays: Any) -> list[Any]:
        whole = [whole_array(x) for x in arrays]
        new_leaves[:] = [Leaves.flatten(init(given.rebuild(whole)), "state")]
        state = new_leaves[0]
        found_cuts[:] = [
            cuts.cut_of_leaf(x, p) for x, p in zip(state.arrays, state.paths, strict=True)
        ]
        return [
            x if c is None else pad_dim(jnp.asarray(x), c.dim, c.padding(c.pieces(layout)))
            for x, c in zip(new_leaves[0].arrays, found_cuts, strict=True)
        ]

    # `out_shardings` needs the structure of the state before the call, so trace it once for the
    # shapes. `flat` fills `new_leaves` and `found_cuts`.
    jax.eval_shape(flat, *given.shape_structs())
    shardings = [
        layout.replicated if c is None else NamedSharding(layout.mesh, c.full_spec(layout))
        for c in found_cuts
    ]
    arrays = [view_auto(_copy_to_layout(x, layout)) for x in _make_equal(given, layout)]
    results = jax.jit(flat, out_shardings=shardings)(*arrays)
    return new_leaves[0].rebuild(
        [x if c is None else Sharded(x, *c) for x, c in zip(results, found_cuts, strict=True)]
    )


# Note [Sharded arrays in NNX state]
# `nnx.Optimizer` makes a variable of each array of the state. A bare `Sharded` is a pytree node,
# so NNX would make a variable of the array inside it, and its dim and size would be lost. A
# `Sharded` that is already in a variable is left unchanged.
def wrap_in_variables(state: PyTree, params: PyTree) -> PyTree:
    """Return a state for parameters of NNX, with each `Sharded` array in an `nnx.Variable`.

    See Note [Sharded arrays in NNX state].
    """
    if not any(map(_is_variable, jax.tree.leaves(params, is_leaf=_is_variable))):
        return state
    return jax.tree.map(
        lambda x: nnx.Variable(x) if isinstance(x, Sharded) else x,
        state,
        is_leaf=stops(Stop.ARRAYS_OF_NODES),
    )


def _is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)


@called("init")
def _make_equal(leaves: Leaves, layout: ReplicaMesh) -> list[Any]:
    """Return the arrays; where processes have different arrays, those of process 0."""
    named = {
        str(name): array
        for name, array in zip(leaves.names, leaves.arrays, strict=True)
        if is_of_this_process(array)
    }
    equal = make_equal(named, layout)
    return [equal.get(str(n), a) for n, a in zip(leaves.names, leaves.arrays, strict=True)]


def _copy_to_layout(array: Any, layout: ReplicaMesh) -> Any:
    if not isinstance(array, jax.Array) or isinstance(array, jax.core.Tracer):
        return copy_if_writable(array)
    return put(array, placement_of(array, layout).sharding)
