"""The elements of per-worker datasets, as arrays."""

from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from jaxdist._typing import PyTree
from jaxdist._validate import as_array


def read_elements(dataset: Iterable[Any]) -> Iterator[PyTree]:
    """Return the elements of a dataset; numbers in them become arrays of NumPy.

    Raises:
        ArgumentTypeError: An element holds something that is no number and no array.
    """
    return map(_convert, iter(dataset))


def _convert(element: Any) -> PyTree:
    return jax.tree.map(_convert_leaf, element)


def _convert_leaf(leaf: Any) -> Any:
    if isinstance(getattr(leaf, "dtype", None), np.dtype):
        return leaf
    return as_array("A per-worker dataset", "element", leaf)
