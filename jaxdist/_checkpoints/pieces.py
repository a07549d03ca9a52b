"""Saves each `Sharded` value as one whole array without padding, and shards it when restored.

So a state can be restored on a different number of replicas.
"""

from typing import Any

import jax
from jax.sharding import NamedSharding, Sharding

from jaxdist._checkpoints.leaves import name_leaves
from jaxdist._typing import PyTree
from jaxdist._values import Sharded, from_state, is_sharded, is_sharded_leaf, pad_dim, put


def gather_whole_arrays(state: PyTree) -> PyTree:
    """Return the state with a whole array for each `Sharded` value, for saving."""
    return jax.tree.map(
        lambda x: from_state(x).whole() if is_sharded_leaf(x) else x,
        state,
        is_leaf=is_sharded_leaf,
    )


def get_whole_shapes(like: PyTree) -> PyTree:
    """Return `like` with the shape and dtype of the whole array for each `Sharded` value."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if is_sharded(x) else x,
        like,
        is_leaf=is_sharded,
    )


def get_layouts_of_pieces(like: PyTree) -> dict[str, Sharding]:
    """Return, by name, the sharding with which Orbax reads each `Sharded` value of `like`.

    This is the sharding of the value, or a replicated sharding if the value has padding.
    """
    found: dict[str, Sharding] = {}
    for name, value in name_leaves(like, is_leaf=is_sharded).items():
        if isinstance(value, Sharded) and isinstance(layout := _get_layout(value), NamedSharding):
            # Orbax reads the array without padding, which the sharding of the padded array does not
            # divide. `cut_like` pads and shards such an array later.
            is_even = value.array.shape[value.dim] == value.size
            found[name] = layout if is_even else NamedSharding(layout.mesh, jax.P())
    return found


def cut_like(state: PyTree, like: PyTree) -> PyTree:
    """Return the state with arrays sharded again where `like` has `Sharded` values."""

    def cut(wanted: Any, array: Any) -> Any:
        if not isinstance(wanted, Sharded):
            return array
        more = wanted.array.shape[wanted.dim] - wanted.size
        padded = pad_dim(array, wanted.dim, more)
        layout = _get_layout(wanted)
        placed = padded if layout is None else put(padded, layout)
        return Sharded(placed, *wanted.cut)

    return jax.tree.map(cut, like, state, is_leaf=is_sharded)


def _get_layout(value: Sharded) -> Sharding | None:
    return getattr(value.array, "sharding", None)
