"""A `Sharded` as a node of pytrees: what functions of pytrees find in it, and make of it."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.tree_util import GetAttrKey, register_pytree_node, register_pytree_with_keys

from jaxdist import _compat
from jaxdist._values.replicas.per_replica import PerReplica
from jaxdist._values.sharded.cuts import Cut
from jaxdist._values.sharded.sharded import Sharded, is_longer, is_sharded, undeclared
from jaxdist._values.variable.variable import Variable

# [Note: the declaration in the key]
# `nnx.Optimizer.update` writes a node of a pytree that it does not know into a variable as an
# `nnx.State` of the node's children by key, and drops the rest. So the key says what the node is.
_KEY = re.compile(r"array_cut_along_(\d+)_of_(\d+)(?:_split_along_(\d+))?(?:_over_(.+))?")


def _key(value: Sharded) -> str:
    over = "" if value.axes is None else f"_over_{','.join(value.axes)}"
    split = "" if value.split is None else f"_split_along_{value.split}"
    return f"array_cut_along_{value.dim}_of_{value.size}{split}{over}"


def from_state(value: Any) -> Any:
    """A `Sharded` that NNX turned into a mapping, as one again; see the note above."""
    if not isinstance(value, Mapping) or len(value) != 1:
        return value
    [(key, array)] = value.items()
    found = _KEY.fullmatch(str(key))
    if found is None:
        return value
    split = None if found[3] is None else int(found[3])
    axes = None if found[4] is None else tuple(found[4].split(","))
    return undeclared(array, Cut(int(found[1]), int(found[2]), axes, split))


def _logical(value: Sharded) -> Any:
    """What functions of pytrees find in a node: the one array."""
    held = value.held
    if not value.has_padding:
        return held
    # A function that asks which arrays are still there has to find it, too.
    is_gone = isinstance(held, jax.Array) and _compat.any_deleted([held])
    return held if is_gone else value.whole()


def _flatten_with_keys(value: Sharded) -> tuple[list[tuple[Any, Any]], Cut]:
    return [(GetAttrKey(_key(value)), _logical(value))], value.cut


def _flatten(value: Sharded) -> tuple[tuple[Any, ...], Cut]:
    return (_logical(value),), value.cut


def _rebuild(cut: Cut, children: Iterable[Any]) -> Any:
    [held] = children
    # Where flattening stopped at nodes, they are what comes back.
    return held if _is_mark(held) or is_sharded(held) else undeclared(held, cut)


def _is_mark(held: Any) -> bool:
    """Whether a function of pytrees put no array into a node, but what it has to say of it.

    A mask, a label, or what is left of an array that was masked out (`optax.MaskedNode`). That
    stands in the place of the node, as it would in the place of an array: masks of trees with
    pieces are then those of trees of arrays.
    """
    is_empty = isinstance(held, tuple) and not held
    return is_empty or isinstance(held, (bool, np.bool_, str))


register_pytree_with_keys(Sharded, _flatten_with_keys, _rebuild, _flatten)


# Note [Padding in nodes]
# A function of pytrees finds in a `Sharded` the one array, without its padding: outside of steps
# that is a slice, whose rows have to move. JAX's call paths are functions of pytrees as well. What
# is padded goes through them as `HeldPieces`, in which the array is found as it is held.


class HeldPieces:
    """A padded array in pieces on its way through a call path of JAX."""

    __slots__ = ("cut", "held")

    def __init__(self, held: Any, cut: Cut) -> None:
        self.held, self.cut = held, cut

    def sharded(self) -> Sharded:
        """What it is for users."""
        return undeclared(self.held, self.cut, has_padding=is_longer(self.held, self.cut))


class PiecesOfResult(HeldPieces):
    """The same in the structure of a result: the node that is rebuilt is a `Sharded`."""

    __slots__ = ()


def as_held(tree: Any) -> Any:
    """The pytree with `HeldPieces` in the place of padded arrays in pieces; itself without any."""
    leaves, treedef = jax.tree.flatten(tree, is_leaf=_is_whole)
    if not any(is_sharded(x) and x.has_padding for x in leaves):
        return tree
    return treedef.unflatten(
        HeldPieces(x.held, x.cut) if is_sharded(x) and x.has_padding else x for x in leaves
    )


def held_leaves(tree: Any) -> list[Any]:
    """The arrays of a pytree, those in pieces as they are held."""
    leaves = jax.tree.leaves(tree, is_leaf=is_sharded)
    return [x.held if is_sharded(x) else x for x in leaves]


def as_sharded(tree: Any) -> Any:
    """The pytree with `Sharded` in the place of `HeldPieces`; itself without any."""
    leaves, treedef = jax.tree.flatten(tree, is_leaf=_is_whole)
    if not any(isinstance(x, HeldPieces) for x in leaves):
        return tree
    return treedef.unflatten(x.sharded() if isinstance(x, HeldPieces) else x for x in leaves)


def _is_whole(x: Any) -> bool:
    # What is rebuilt would be another object: a step updates modules in place.
    return isinstance(x, (Sharded, HeldPieces, PerReplica, Variable, nnx.Pytree))


def _flatten_held(node: HeldPieces) -> tuple[tuple[Any, ...], Cut]:
    return (node.held,), node.cut


def _rebuild_held(cut: Cut, children: Iterable[Any]) -> HeldPieces:
    [held] = children
    return HeldPieces(held, cut)


def _rebuild_result(cut: Cut, children: Iterable[Any]) -> Any:
    [held] = children
    node = PiecesOfResult(held, cut)
    # A template has numbers in the place of arrays.
    return node.sharded() if hasattr(held, "shape") else node


register_pytree_node(HeldPieces, _flatten_held, _rebuild_held)
register_pytree_node(PiecesOfResult, _flatten_held, _rebuild_result)
