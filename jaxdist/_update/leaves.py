"""Flat pytrees, so that JAX can trace a function of their arrays, and how these are sharded."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jax.tree_util import PyTreeDef, keystr

from jaxdist import cost
from jaxdist._called import called
from jaxdist._mesh import ReplicaMesh
from jaxdist._typing import PyTree
from jaxdist._validate import as_array
from jaxdist._values import Cut, Sharded, from_state, is_sharded_leaf

# A marker that replaces an array. Other leaves may be any object, including None.
ARRAY = object()


@dataclasses.dataclass(frozen=True)
class Leaves:
    """A flat pytree: its arrays in order, and its other leaves, which are not traced."""

    treedef: PyTreeDef
    leaves: tuple[Any, ...]  # with `ARRAY` instead of each array
    arrays: tuple[Any, ...]
    names: tuple[str, ...]  # of the arrays
    paths: tuple[str, ...]  # the names without that of the pytree

    @classmethod
    @called("sharded_update: update")
    def flatten(cls, tree: PyTree, name: str) -> "Leaves":
        """Flatten a pytree; `Sharded` arrays are leaves."""
        flat, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_sharded_leaf)
        leaves: list[Any] = []
        arrays: list[Any] = []
        paths: list[str] = []
        for path, leaf in flat:
            leaf = from_state(leaf)
            if is_array(leaf):
                leaves.append(ARRAY)
                paths.append(keystr(path))
                # Python numbers become arrays; objects and strings raise an error that names them.
                own = hasattr(leaf, "dtype") and getattr(leaf.dtype, "kind", "V") not in "OSUmM"
                if not own:
                    leaf = as_array(name + paths[-1], leaf)
                arrays.append(leaf)
            else:
                leaves.append(leaf)
        names = tuple(name + path for path in paths)
        return cls(treedef, tuple(leaves), tuple(arrays), names, tuple(paths))

    def rebuild(self, arrays: Iterable[Any]) -> PyTree:
        """Return the pytree with other arrays; takes as many from an iterator as it needs."""
        rest = iter(arrays)
        leaves = [next(rest) if x is ARRAY else x for x in self.leaves]
        return jax.tree.unflatten(self.treedef, leaves)

    def shape_structs(self) -> list[jax.ShapeDtypeStruct]:
        """Return the shapes and dtypes of the whole arrays."""
        # Keep weak types, so that the trace promotes dtypes as untraced code does.
        return [
            jax.ShapeDtypeStruct(
                x.shape, _find_dtype(x), weak_type=bool(getattr(x, "weak_type", False))
            )
            for x in self.arrays
        ]


def _find_dtype(array: Any) -> Any:
    """Return the dtype of an array in JAX, which warns about NumPy's float64 from 0.12 on."""
    is_numpys = isinstance(array, (np.ndarray, np.generic))
    return jax.dtypes.canonicalize_dtype(array.dtype) if is_numpys else array.dtype


def is_array(leaf: Any) -> bool:
    """Whether a leaf is an array or a number."""
    # A transformation may use a Python bool, a setting, in an `if`, so it is not traced.
    if isinstance(leaf, bool):
        return False
    return isinstance(leaf, (Sharded, int, float, complex)) or hasattr(leaf, "dtype")


# A dim is not sharded if padding would make it longer than this factor.
_MOST_PADDING = 1.5


def min_bytes_to_cut(layout: ReplicaMesh) -> float:
    """Return the number of bytes (in float32) from which a leaf is updated in pieces.

    A leaf in pieces needs its own reduce-scatter and all-gather, but each replica reads and writes
    only a part of it. A small leaf shares one all-reduce with others. Pieces are faster from the
    size at which packing a leaf into an all-reduce becomes slower: `latency * bandwidth / 2`.
    """
    return cost.pack_below(cost.links_of(layout).inner)


class Cuts:
    """The rule of one strategy, which depends only on shapes.

    So a parameter and its optimizer state are sharded in the same way, whatever their dtypes are.
    The state of a `Sharded` parameter is sharded like the parameter.
    """

    def __init__(
        self, layout: ReplicaMesh, min_bytes: float | None, params: Leaves | None = None
    ) -> None:
        self.num_replicas = layout.num_replicas
        self._least = min_bytes_to_cut(layout) if min_bytes is None else min_bytes
        self._known_cuts: list[tuple[str, tuple[int, ...], Cut]] = []
        if params is not None:
            for array, path in zip(params.arrays, params.paths, strict=True):
                if isinstance(array, Sharded):
                    self._known_cuts.append((path, array.shape, array.cut))
            # Try longer paths first: a path may end with the paths of several parameters.
            self._known_cuts.sort(key=lambda known: -len(known[0]))

    def cut_of_leaf(self, array: Any, path: str) -> Cut | None:
        """Return the `Cut` of a leaf of gradients or state at this path; None if it stays whole."""
        # Random keys have trailing dims that are not in their shape, so they stay whole.
        if jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended):
            return None
        shape = tuple(array.shape)
        for tail, wanted, cut in self._known_cuts:
            if path.endswith(tail) and shape == wanted:
                return cut
        return self.cut_of_shape(shape)

    def cut_of_shape(self, shape: tuple[int, ...]) -> Cut | None:
        """Return the `Cut` of an array of this shape; None if it stays whole."""
        count = self.num_replicas
        size = math.prod(shape)
        if count == 1 or not shape or not size or 4 * size < self._least:
            return None
        longer = [math.ceil(n / count) * count / n for n in shape]
        dim = longer.index(min(longer))
        return Cut(dim, shape[dim]) if longer[dim] <= _MOST_PADDING else None
