"""Flat pytrees, so that JAX can trace a function of their arrays."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jax.tree_util import PyTreeDef, keystr

from jaxdist._called import called
from jaxdist._typing import PyTree
from jaxdist._validate import as_array
from jaxdist._values import Sharded, from_state, is_sharded_leaf

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
