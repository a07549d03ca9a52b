"""Pytrees as JSON, so that the structure of a batch can be sent."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jaxdist._parameter_server.variables.ports import make_zero
from jaxdist._typing import PyTree
from jaxdist.errors import UnsupportedError

# A list of more arrays is a dataset.
_MOST_LEAVES = 256
_ARRAYS = (np.ndarray, np.generic, jax.Array)
_KINDS = {dict: "dict", list: "list", tuple: "tuple"}


def is_value(value: Any) -> bool:
    """Return whether what a function has made can be an argument of closures, and is no dataset."""
    if not isinstance(value, (dict, list, tuple, *_ARRAYS)):
        return False
    leaves = jax.tree.leaves(value)
    return 0 < len(leaves) <= _MOST_LEAVES and all(isinstance(x, _ARRAYS) for x in leaves)


def describe_tree(what: str, tree: PyTree) -> Any:
    """Return the structure of a pytree of arrays, and their shapes and dtypes, as JSON.

    Args:
        what: What it is, for errors.
        tree: Dicts with texts as keys, lists, tuples and None, with arrays as leaves.

    Raises:
        UnsupportedError: It has another container.

    Example:
        >>> from jaxdist._parameter_server.worker.structures import describe_tree
        >>> describe_tree("a batch", {"x": np.zeros((2, 3), np.float32)})
        ['dict', [['x', ['float32', [2, 3]]]]]
    """
    if tree is None:
        return None
    kind = _KINDS.get(type(tree))
    if kind == "dict" and all(isinstance(key, str) for key in tree):
        return [kind, [[key, describe_tree(what, tree[key])] for key in sorted(tree)]]
    if kind in ("list", "tuple"):
        return [kind, [describe_tree(what, item) for item in tree]]
    if not jax.tree_util.all_leaves([tree]):
        raise UnsupportedError(
            f"{what} contains a {type(tree).__name__}.\n\n"
            "What workers in other processes read are dicts with texts as keys, lists, tuples "
            "and None, with arrays in them: the coordinator has to know its structure.\n\n"
            "Make a dict or a tuple of it, for instance in dataset_fn."
        )
    array = tree if hasattr(tree, "dtype") else np.asarray(tree)
    return [np.dtype(array.dtype).name, list(map(int, np.shape(array)))]


def make_template(described: Any) -> PyTree:
    """Return a pytree of zeros that `describe_tree` has described. They take no memory."""
    if described is None:
        return None
    kind, content = described
    if kind == "dict":
        return {key: make_template(item) for key, item in content}
    if kind == "list":
        return [make_template(item) for item in content]
    if kind == "tuple":
        return tuple(make_template(item) for item in content)
    return make_zero(tuple(content), jax.numpy.dtype(kind))


def list_leaves(batches: list[list[PyTree]]) -> Iterator[tuple[tuple[int, ...], Any]]:
    """Return the leaves of batches, with the numbers of iterator, batch and leaf."""
    for source, own in enumerate(batches):
        for batch, element in enumerate(own):
            for leaf, value in enumerate(jax.tree.leaves(element)):
                yield (source, batch, leaf), value
