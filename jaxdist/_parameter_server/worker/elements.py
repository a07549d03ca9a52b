"""The elements of per-worker datasets, as arrays."""

from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from jaxdist._typing import PyTree
from jaxdist._validate import show
from jaxdist.errors import ArgumentTypeError


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
    array = np.asarray(leaf)
    if array.dtype.kind in "OSUMm":
        raise ArgumentTypeError(
            f"A per-worker dataset has an element that contains {show(leaf)}.\n\n"
            "Functions take arrays and numbers from it.\n\n"
            "Leave it out in dataset_fn, or replace texts by numbers."
        )
    return array
