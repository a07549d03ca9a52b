"""The elements of per-worker datasets, as arrays."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from jaxdist._integers import check_all_fit
from jaxdist._typing import PyTree
from jaxdist._validate import show
from jaxdist.errors import ArgumentTypeError


def read_elements(dataset: Iterable[Any]) -> Iterator[PyTree]:
    """Return the elements of a dataset; numbers in them become arrays of NumPy.

    Raises:
        ArgumentTypeError: An element holds something that is no number and no array.
        ArgumentError: It holds integers that JAX would cut off.
    """
    return map(_convert, itertools.count(), iter(dataset))


def _convert(number: int, element: Any) -> PyTree:
    arrays = jax.tree.map(_convert_leaf, element)
    check_all_fit(f"element {number} of a per-worker dataset", "batch", arrays)
    return arrays


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
