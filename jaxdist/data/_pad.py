"""Filling leaves up with rows of zeros, to one number of rows for all batches."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.data._reading.elements import Element, Leaf, describe_array, device_dtype, format_lines
from jaxdist.data._reading.host import copy_padded
from jaxdist.data._reading.partial_batch import round_up
from jaxdist.errors import ShapeError


class FixedRows:
    """The one number of rows that all padded batches have.

    Args:
        caller: Whom messages name.
        multiple: What it is a multiple of.
        rows: What it is at least, where that is known; else the first batch decides.
    """

    def __init__(self, caller: str, multiple: int, rows: int) -> None:
        self._caller = caller
        self._multiple = multiple
        self.rows = round_up(rows, multiple)

    def fit(self, elements: Sequence[Element], index: int) -> list[int]:
        """The real rows of each element; 0 for one that has scalars alone."""
        counts = [element.rows or 0 for element in elements]
        largest = max(counts)
        if not self.rows:
            self.rows = round_up(largest, self._multiple)
        if largest > self.rows:
            raise self._too_large_error(elements[counts.index(largest)], largest, index)
        return counts

    def _too_large_error(self, element: Element, count: int, index: int) -> ShapeError:
        lines = [
            f"{n} is {describe_array(x)}"
            for n, x in zip(element.names(), element.leaves, strict=True)
        ]
        up = round_up(count, self._multiple)
        return ShapeError(
            f"{self._caller} cannot pad batch {index} of the dataset to {self.rows} rows: it has "
            f"{count}.\n{format_lines(lines)}\n\n"
            "With partial_batch=PAD all batches are padded to one number of rows, which the first "
            "one decides, so that the step is compiled once.\n\n"
            f"Give a batch of the full size first ({up} rows or more), cut the larger ones to "
            f"{self.rows} rows, or use partial_batch=UNEVEN."
        )


def pad_rows(leaf: Leaf, rows: int) -> Leaf:
    """`leaf` with rows of zeros added until there are `rows`; itself where there are."""
    missing = rows - leaf.shape[0]
    if not missing:
        return leaf
    if isinstance(leaf, jax.Array):
        return jnp.concatenate([leaf, make_zeros(leaf, (missing, *leaf.shape[1:]))])
    return copy_padded(leaf, device_dtype(leaf.dtype), rows)


def make_zeros(like: Leaf, shape: tuple[int, ...]) -> Leaf:
    """Zeros of the dtype and the kind of `like`; of random keys, the keys made of zeros."""
    if not isinstance(like, jax.Array):
        return np.zeros(shape, device_dtype(like.dtype))
    if not jnp.issubdtype(like.dtype, jax.dtypes.extended):
        return jnp.zeros(shape, like.dtype)
    bits = jax.eval_shape(jax.random.key_data, like)
    zeros = jnp.zeros((*shape, *bits.shape[like.ndim :]), bits.dtype)
    return jax.random.wrap_key_data(zeros, impl=jax.random.key_impl(like))
