"""Compares the results of a step on the replicas with its results on one device."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.tree_util import keystr

from jaxdist._called import refuse
from jaxdist._checks.gradient_report import LeafComparison, compare, raise_noise_floor
from jaxdist._mesh import ReplicaMesh
from jaxdist._typing import PyTree
from jaxdist._values import (
    Kind,
    Sharded,
    Stop,
    first_value,
    is_per_replica,
    is_sharded,
    placement_of,
    put,
    stops,
)


def compare_results(
    given: PyTree, many: PyTree, one: PyTree, layout: ReplicaMesh, rtol: float
) -> tuple[list[LeafComparison], list[str]]:
    """Compare every result that is equal on all replicas; also return the names of the others.

    Args:
        given: The arguments of the step.
        many: The results on the replicas.
        one: The results on one device.
        layout: The replicas.
        rtol: The largest relative difference that counts as equal.
    """
    if _structure(many) != _structure(one):
        raise refuse(
            f"a step that returns another structure on one device.\n{layout.num_replicas} "
            f"replicas: {_structure(many)}\none device: {_structure(one)}",
            "Results are compared leaf by leaf.",
            "Return the same structure for any number of replicas.",
        )
    comparison = _ResultComparer(given, layout, rtol)
    comparison.visit("result", many, one)
    return comparison.leaves, comparison.not_compared


_Pair = tuple[str, Any, Any, Any]


def _structure(tree: PyTree) -> Any:
    return jax.tree.structure(tree, is_leaf=is_per_replica)


class _ResultComparer:
    """Visits the results, largest subtrees first, and matches each subtree with an argument."""

    def __init__(self, given: PyTree, layout: ReplicaMesh, rtol: float) -> None:
        self._layout = layout
        self._rtol = rtol
        self._parts: dict[Any, list[list[Any]]] = {}
        self._list_parts(given)
        self._matched: set[int] = set()
        self.leaves: list[LeafComparison] = []
        self.not_compared: list[str] = []

    def _list_parts(self, tree: PyTree) -> None:
        # Index every subtree by its structure: a step may return only a part of its arguments, for
        # instance the new parameters of a `TrainState`.
        leaves, treedef = jax.tree.flatten(tree, is_leaf=is_argument_leaf)
        self._parts.setdefault(treedef, []).append(leaves)
        for _, child in _children(tree, is_argument_leaf):
            self._list_parts(child)

    def visit(self, name: str, many: PyTree, one: PyTree) -> None:
        """Compare one subtree of the results, as a whole or child by child."""
        before = self._find_previous(many)
        children = _children(many, is_per_replica)
        if before is None and children:
            others = _children(one, is_per_replica)
            for (path, a), (_, b) in zip(children, others, strict=True):
                self.visit(name + keystr(path), a, b)
            return
        found, rest = _pair_leaves(name, before, many, one)
        self.leaves += _compare_pairs(found, self._rtol)
        # A new state must be mirrored, so a per-replica leaf in it is a difference. A per-replica
        # leaf elsewhere (a local loss) is legitimate and has no single value to compare. A single
        # leaf does not prove that it is state: its shape may match an argument by chance.
        if before is not None and len(found) + len(rest) > 1:
            remark = "different on each replica"
            self.leaves += [LeafComparison(n, is_equal=False, remark=remark) for n in rest]
        else:
            self.not_compared += rest

    def _find_previous(self, result: PyTree) -> list[Any] | None:
        """Return the leaves of the argument of which `result` is the new value; None if none is."""
        leaves, treedef = jax.tree.flatten(result, is_leaf=is_per_replica)
        if not any(map(_is_result, leaves)):
            return None
        for before in self._parts.get(treedef, ()):
            pairs = list(zip(before, leaves, strict=True))
            # Each array is the previous value of only one result: of two results with the structure
            # of the parameters, one is the new state and the other is the gradients.
            if any(id(x) in self._matched for x in before if is_number(x)):
                continue
            if all(_can_be_previous(a, b, self._layout) for a, b in pairs):
                self._matched.update(map(id, before))
                return before
        return None


def _children(tree: PyTree, is_leaf: Callable[[Any], bool]) -> list[tuple[Any, Any]]:
    """Return the direct children of a pytree node with their keys; an empty list for a leaf."""
    if is_leaf(tree) or jax.tree_util.all_leaves([tree]):
        return []
    return jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)[0]


def _can_be_previous(before: Any, after: Any, layout: ReplicaMesh) -> bool:
    """Whether `after` can be the new value of `before`: mirrored, same shape and kind of number."""
    local = first_value(after)
    if not is_number(local):
        return not is_number(before)
    if not is_number(before) and not isinstance(before, (int, float, complex)):
        return False
    # A step counter and a loss are both scalars, and only their dtypes tell them apart.
    if _is_exact(before) != _is_exact(local):
        return False
    is_mirrored = placement_of(before, layout).kind is Kind.MIRRORED
    return is_mirrored and np.shape(before) == np.shape(local)


def _is_exact(x: Any) -> bool:
    return jax.dtypes.issubdtype(jax.numpy.result_type(x), np.integer)


def _pair_leaves(
    name: str, before: list[Any] | None, many: PyTree, one: PyTree
) -> tuple[list[_Pair], list[str]]:
    flat, _ = jax.tree_util.tree_flatten_with_path(many, is_leaf=is_per_replica)
    others = jax.tree.leaves(one, is_leaf=is_per_replica)
    starts = before if before is not None else [None] * len(flat)
    found: list[_Pair] = []
    rest: list[str] = []
    for (path, a), b, start in zip(flat, others, starts, strict=True):
        if is_per_replica(a):
            rest.append(name + keystr(path))
        elif is_number(a):
            found.append((name + keystr(path), start, np.asarray(a), np.asarray(b)))
    return found, rest


def _compare_pairs(pairs: list[_Pair], rtol: float) -> list[LeafComparison]:
    """Compare results as values and, if an argument matches, also as new state.

    Gradients and new parameters have the same structure, so the structure does not show which of
    the two a result is. The reading that explains more leaves by one factor is used. Results count
    as equal only if they are equal in both readings.
    """
    values = raise_noise_floor([compare(n, None, a, b, rtol) for n, _, a, b in pairs])
    if all(start is None for _, start, _, _ in pairs):
        return list(values)
    moved = raise_noise_floor(
        [compare(n, None if s is None else np.asarray(s), a, b, rtol) for n, s, a, b in pairs]
    )
    if not any(x.differs for x in moved) or _count_scaled(values) > _count_scaled(moved):
        return list(values)
    return list(moved)


def _count_scaled(leaves: Sequence[LeafComparison]) -> int:
    return sum(x.differs and x.is_uniform for x in leaves)


def _is_result(x: Any) -> bool:
    return is_per_replica(x) or is_number(x)


def is_number(x: Any) -> bool:
    """Whether `x` is an array that can be subtracted (random keys cannot)."""
    if not isinstance(x, (jax.Array, np.ndarray, np.generic)):
        return False
    return not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


# Whether `x` is a leaf when arguments are flattened.
is_argument_leaf = stops(Stop.COMPARED)


def split_for_one_replica(tree: PyTree) -> PyTree:
    """Return the tree with each `Sharded` array rebuilt for one replica."""
    return jax.tree.map(
        lambda x: Sharded(np.asarray(x.whole()), *x.cut) if is_sharded(x) else x,
        tree,
        is_leaf=stops(Stop.GATHERED),
    )


def assemble_sharded(tree: PyTree, layout: ReplicaMesh) -> PyTree:
    """Return the tree with each `Sharded` array replaced by a plain mirrored array."""
    return jax.tree.map(
        lambda x: put(x.whole(), layout.replicated) if is_sharded(x) else x,
        tree,
        is_leaf=stops(Stop.GATHERED),
    )
