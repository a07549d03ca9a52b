"""`Sharded` as a pytree node: what functions of pytrees find in it and rebuild."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.tree_util import GetAttrKey, register_pytree_node, register_pytree_with_keys

from jaxdist import _compat
from jaxdist._called import called, refuse
from jaxdist._values.sharded.cuts import Cut, Splits
from jaxdist._values.sharded.sharded import (
    Sharded,
    assign_elements,
    is_longer,
    is_sharded,
    make_undeclared,
)
from jaxdist.errors import ArgumentError, UnsupportedError

# Note [Declaration in the key]
# `nnx.Optimizer.update` stores a pytree node that NNX does not know as an `nnx.State`: a mapping
# from keys to the children of the node. The auxiliary data of the node, here its `Cut`, is lost.
# So the key of the one child contains the `Cut`, and `from_state` makes the node from the key.
_KEY = re.compile(
    r"array_cut_along_(\d+)_of_(\d+)(?:_split_along_(\d+|\[[^\]]*\]))?(?:_over_(.+))?"
)


def _make_key(value: Sharded) -> str:
    """Return the key of the child; see Note [Declaration in the key]."""
    over = "" if value.axes is None else f"_over_{','.join(value.axes)}"
    pairs = value.split if isinstance(value.split, tuple) else ()
    dims = f"[{','.join(f'{d}@{axis}' for d, axis in pairs)}]" if pairs else value.split
    split = "" if value.split is None else f"_split_along_{dims}"
    return f"array_cut_along_{value.dim}_of_{value.size}{split}{over}"


def from_state(value: Any) -> Any:
    """Turn a mapping back that NNX made from a `Sharded`; see Note [Declaration in the key]."""
    if not isinstance(value, Mapping) or len(value) != 1:
        return value
    [(key, array)] = value.items()
    found = _KEY.fullmatch(str(key))
    if found is None:
        return value
    axes = None if found[4] is None else tuple(found[4].split(","))
    return make_undeclared(array, Cut(int(found[1]), int(found[2]), axes, _read_split(found[3])))


def _read_split(text: str | None) -> int | Splits | None:
    if text is None or not text.startswith("["):
        return None if text is None else int(text)
    pairs = (pair.split("@", 1) for pair in text[1:-1].split(","))
    return tuple((int(dim), axis) for dim, axis in pairs)


def is_sharded_leaf(x: Any) -> bool:
    """Whether `x` is a `Sharded`, or a mapping that NNX made from one."""
    return is_sharded(from_state(x))


def _remove_padding(value: Sharded) -> Any:
    """Return what functions of pytrees find in a node: the array without padding."""
    held = value.held
    if not value.has_padding:
        return held
    # A deleted array cannot be sliced. It is returned unchanged, so a search for deleted arrays
    # finds it.
    is_gone = isinstance(held, jax.Array) and _compat.has_deleted([held])
    return held if is_gone else value.whole()


# Note [Rows of nodes]
# A scan, `vmap` or an index makes nodes again from an array of another rank. So a node keeps the
# rank of its array. The cut of the new array is that after the first dim was removed or
# inserted, or the old one where only that fits the sizes. This guess may be wrong: in a step the
# proof knows how each array is cut, and refuses a node with another cut. Two structures are equal
# if their cuts are, so a tree of masks or numbers has the structure of the tree of arrays.


class _Structure:
    """The static data of a node: how its array is cut, the rank of the array, and its identity.

    An array counts as assigned as long as it is the same object: a copy of the node may hold it,
    and a transformation of JAX makes another array from it.
    """

    __slots__ = ("assigned", "cut", "rank")

    def __init__(self, value: Sharded) -> None:
        self.cut = value.cut
        self.rank: int | None = getattr(value.held, "ndim", None)
        self.assigned = id(value.held) if value.is_assigned else None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Structure) and self.cut == other.cut

    def __hash__(self) -> int:
        return hash(self.cut)

    def __repr__(self) -> str:
        return repr(self.cut)

    def cut_of(self, held: Any) -> Cut:
        """Return the cut of an array that was made from the node's array."""
        rank = getattr(held, "ndim", None)
        if rank is None or self.rank is None or rank == self.rank:
            return self.cut
        moved = self.cut
        for _ in range(abs(rank - self.rank)):
            moved = moved.before(0) if rank < self.rank else moved.insert_dim(0)
        fits = [c for c in (moved, self.cut) if c.dim < rank and held.shape[c.dim] == c.size]
        return fits[0] if fits else self.cut


def _flatten_with_keys(value: Sharded) -> tuple[list[tuple[Any, Any]], _Structure]:
    return [(GetAttrKey(_make_key(value)), _remove_padding(value))], _Structure(value)


def _flatten(value: Sharded) -> tuple[tuple[Any, ...], _Structure]:
    return (_remove_padding(value),), _Structure(value)


def _rebuild(structure: _Structure, children: Iterable[Any]) -> Any:
    [held] = children
    # A map whose `is_leaf` stops at `Sharded` returns whole nodes, which must not be nested.
    if _is_metadata(held) or is_sharded(held):
        return held
    if not hasattr(held, "shape"):
        _refuse_arguments_of_orbax(held, structure.cut)
    # Another array may have got the identity of one that is gone; a piece has fewer elements.
    is_assigned = structure.assigned == id(held) and structure.cut.is_whole(held.shape)
    return make_undeclared(held, structure.cut_of(held), is_assigned=is_assigned)


@called("Orbax")
def _refuse_arguments_of_orbax(held: Any, cut: Cut) -> None:
    """Raise if Orbax makes its arguments for an array in pieces.

    It loses them later, where it makes a tree of the names of the arrays.
    """
    if type(held).__module__.startswith("orbax.") and type(held).__name__.endswith("Args"):
        raise refuse(
            f"a pytree with an array in pieces, a jaxdist.Sharded that is cut along dim {cut.dim} "
            f"of {cut.size} elements.",
            "Orbax knows arrays, and a Sharded is a pytree node.",
            "Use jaxdist.training.Checkpoints, which saves and restores it on any number of "
            "devices. To use Orbax itself, give it the arrays: jax.tree.map(lambda x: x.whole() "
            "if isinstance(x, jaxdist.Sharded) else x, tree, is_leaf=lambda x: isinstance(x, "
            "jaxdist.Sharded)); and place what it restores: jaxdist.partition.place(strategy, "
            "restored, rules).",
            kind=UnsupportedError,
        )


def _explain_other_structure(where: str, value: Sharded, other: Any) -> ArgumentError | None:
    """Return the error for two trees if one has a node where the other has no equal one."""
    if is_sharded(other) and other.cut == value.cut:
        return None
    # Where JAX compares structures alone, it has a placeholder for each leaf.
    kind = type(other).__name__.replace("PytreeLeaf", "leaf")
    found = repr(other) if is_sharded(other) else f"a {kind}"
    return ArgumentError(
        f"{where}: one pytree has {value!r} here, and the other has {found}.\n\n"
        "An array in pieces is a pytree node with one leaf, so both trees need the same node at "
        "the same place.\n\n"
        "Stop at these nodes, which have the shape, dtype and sharding of the whole array: "
        "jax.tree.map(fn, tree, other, is_leaf=lambda x: isinstance(x, jaxdist.Sharded)). Or place "
        "the other tree by the same rules: jaxdist.partition.place(strategy, other, rules)."
    )


_compat.explain_tree_errors(Sharded, _explain_other_structure)


def _is_metadata(held: Any) -> bool:
    """Whether `tree_map` replaced the array by metadata: a mask, a label, or `optax.MaskedNode`.

    Metadata replaces the node, as it would replace an array. So a mask of a tree with `Sharded`
    nodes has the same structure as a mask of a tree of arrays. A mask is of Python's booleans or of
    arrays of one boolean, as in the state of `optax.zero_nans`.
    """
    is_empty = isinstance(held, tuple) and not held
    if is_empty or isinstance(held, (bool, np.bool_, str)):
        return True
    return getattr(held, "dtype", None) == np.bool_ and getattr(held, "shape", None) == ()


register_pytree_with_keys(Sharded, _flatten_with_keys, _rebuild, _flatten)
_compat.let_variables_hold(Sharded, assign_elements, from_state)


# Note [Padding in nodes]
# Functions of pytrees find in a `Sharded` the array without padding. Outside of steps this is a
# slice, which moves rows between devices. JAX's call paths (`jit`, C++ dispatch) are functions of
# pytrees too, and would pay for the slice at every call. So padded arrays pass through them in
# `HeldPieces`, whose child is the padded array itself.


class HeldPieces:
    """A padded `Sharded` on its way through a call path of JAX; see Note [Padding in nodes]."""

    __slots__ = ("cut", "held")

    def __init__(self, held: Any, cut: Cut) -> None:
        self.held, self.cut = held, cut

    def sharded(self) -> Sharded:
        """Return the `Sharded` that users see."""
        return make_undeclared(self.held, self.cut, has_padding=is_longer(self.held, self.cut))


class PiecesOfResult(HeldPieces):
    """`HeldPieces` in the structure of a result: unflattening rebuilds it as a `Sharded`."""

    __slots__ = ()


def _flatten_held(node: HeldPieces) -> tuple[tuple[Any, ...], Cut]:
    return (node.held,), node.cut


def _rebuild_result(cut: Cut, children: Iterable[Any]) -> Any:
    [held] = children
    node = PiecesOfResult(held, cut)
    # JAX also unflattens templates, which have numbers in place of arrays.
    return node.sharded() if hasattr(held, "shape") else node


register_pytree_node(HeldPieces, _flatten_held, lambda cut, held: HeldPieces(next(iter(held)), cut))
register_pytree_node(PiecesOfResult, _flatten_held, _rebuild_result)
