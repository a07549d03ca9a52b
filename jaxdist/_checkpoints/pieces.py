"""Arrays in pieces in checkpoints: each is saved as the one array that it stands for.

So a state that was saved with one number of replicas is restored with another.
"""

from typing import Any

import jax
from jax.sharding import NamedSharding, Sharding

from jaxdist._checkpoints.leaves import name_leaves
from jaxdist._typing import PyTree
from jaxdist._values import Sharded, from_state, is_sharded, pad_dim


def gather_whole_arrays(state: PyTree) -> PyTree:
    """The state with whole arrays, for saving."""
    return jax.tree.map(
        lambda x: from_state(x).whole() if _is_sharded_value(x) else x,
        state,
        is_leaf=_is_sharded_value,
    )


def get_whole_shapes(like: PyTree) -> PyTree:
    """The same for what is to be restored: shapes and dtypes only."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if is_sharded(x) else x,
        like,
        is_leaf=is_sharded,
    )


def get_layouts_of_pieces(like: PyTree) -> dict[str, Sharding]:
    """By name, how the arrays in pieces are read: as they lie, where there is no padding."""
    found: dict[str, Sharding] = {}
    marked = jax.tree.map(lambda x: _Leaf(x), like, is_leaf=is_sharded)
    for name, leaf in name_leaves(marked).items():
        value = leaf.value
        if isinstance(value, Sharded) and isinstance(layout := _get_layout(value), NamedSharding):
            is_even = value.array.shape[value.dim] == value.size
            found[name] = layout if is_even else NamedSharding(layout.mesh, jax.P())
    return found


def cut_like(state: PyTree, like: PyTree) -> PyTree:
    """Whole arrays in pieces again, where `like` has pieces."""

    def cut(wanted: Any, array: Any) -> Any:
        if not isinstance(wanted, Sharded):
            return array
        more = wanted.array.shape[wanted.dim] - wanted.size
        padded = pad_dim(array, wanted.dim, more)
        layout = _get_layout(wanted)
        held = padded if layout is None else jax.device_put(padded, layout)
        return Sharded(held, *wanted.cut)

    return jax.tree.map(cut, like, state, is_leaf=is_sharded)


def _get_layout(value: Sharded) -> Sharding | None:
    found: Sharding | None = getattr(value.array, "sharding", None)
    return found


class _Leaf:
    """Keeps a node whole, under the name that it has in its pytree."""

    dtype: Any = None

    def __init__(self, value: Any) -> None:
        self.value = value


def _is_sharded_value(x: Any) -> bool:
    return is_sharded(x) or is_sharded(from_state(x))
