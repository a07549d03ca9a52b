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

    def shard(array: Any, name: str, path: str) -> Any:
        cut = None if isinstance(array, Sharded) else cuts.cut_of_leaf(array, path)
        return array if cut is None else Sharded(Whole(array, layout, name).piece(cut), *cut)

    return leaves.rebuild(map(shard, leaves.arrays, leaves.names, leaves.paths))


@_compat.outside_of_meshes
def shard_outside(state: PyTree, layout: ReplicaMesh, cuts: Cuts) -> PyTree:
    """Shard a state of any layout over the replicas of one strategy."""
    leaves = Leaves.flatten(state, "state")

    def shard(array: Any, path: str) -> Any:
        whole = whole_array(array)
        cut = cuts.cut_of_leaf(whole, path)
        if cut is None:
            return put(copy_if_writable(whole), layout.replicated)
        return cut_and_place(whole, cut, layout)

    return leaves.rebuild(map(shard, _make_equal(leaves, layout), leaves.paths))


@_compat.outside_of_meshes
def init_outside(
    init: Callable[[PyTree], PyTree], params: PyTree, layout: ReplicaMesh, cuts: Cuts
) -> PyTree:
    """Compute the state that `init` makes in pieces, so that no device ever holds all of it."""
    given = Leaves.flatten(params, "params")
    new_leaves: list[Leaves] = []
    found_cuts: list[Cut | None] = []

    def flat(*arrays: Any) -> list[Any]:
        whole = map(whole_array, arrays)
        state = Leaves.flatten(init(given.rebuild(whole)), "state")
        new_leaves[:], found_cuts[:] = [state], map(cuts.cut_of_leaf, state.arrays, state.paths)
        return [
            x if c is None else pad_dim(jnp.asarray(x), c.dim, c.padding(c.pieces(layout)))
            for x, c in zip(state.arrays, found_cuts, strict=True)
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
    variables = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, nnx.Variable))
    if not any(isinstance(x, nnx.Variable) for x in variables):
        return state
    return jax.tree.map(
        lambda x: nnx.Variable(x) if isinstance(x, Sharded) else x,
        state,
        is_leaf=stops(Stop.ARRAYS_OF_NODES),
    )


@called("init")
def _make_equal(leaves: Leaves, layout: ReplicaMesh) -> list[Any]:
    """Return the arrays; where processes have different arrays, those of process 0."""
    pairs = list(zip(leaves.names, leaves.arrays, strict=True))
    equal = make_equal({n: a for n, a in pairs if is_of_this_process(a)}, layout)
    return [equal.get(n, a) for n, a in pairs]


def _copy_to_layout(array: Any, layout: ReplicaMesh) -> Any:
    if not isinstance(array, jax.Array) or isinstance(array, jax.core.Tracer):
        return copy_if_writable(array)
    return put(array, placement_of(array, layout).sharding)
