"""Padding of leaves with rows of zeros, to one number of rows for all batches.

# Note [One padded size]
With `partial_batch=PAD` all batches have one shape, so a step is compiled once. The dataset gives
the batch size if it has one (`Batches`); otherwise the first batch decides. The state of an
iterator holds the number of rows (`padded_rows`). Without it a pass that is resumed just before
the short last batch would choose a smaller shape, and compile the step again.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist._called import name_call
from jaxdist.data._reading.elements import (
    Element,
    Leaf,
    copy_padded,
    describe_array,
    device_dtype,
    format_lines,
)
from jaxdist.data._reading.partial_batch import round_up
from jaxdist.errors import ShapeError


class FixedRows:
    """The number of rows that all padded batches have. See Note [One padded size].

    Args:
        caller: The name of the function in messages.
        multiple: A divisor of the number of rows.
        rows: The least number of rows if it is known; with 0 the first batch decides.
    """

    def __init__(self, multiple: int, rows: int) -> None:
        self._caller = name_call()
        self._multiple = multiple
        self.rows = round_up(rows, multiple)

    def fit(self, elements: Sequence[Element], index: int) -> list[int]:
        """Return the number of real rows of each element; 0 for an element of scalars.

        The first call fixes `rows` if it was unknown.

        Raises:
            ShapeError: An element has more rows than batches are padded to.
        """
        counts = [element.rows or 0 for element in elements]
        largest = max(counts)
        if not self.rows:
            self.rows = round_up(largest, self._multiple)
        if largest > self.rows:
            raise self._too_large_error(elements[counts.index(largest)], largest, index)
        return counts

    def _too_large_error(self, element: Element, count: int, index: int) -> ShapeError:
        lines = [f"{n} is {describe_array(x)}" for n, x in element.named_leaves()]
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
    """Return `leaf` padded with rows of zeros to `rows`; the same object if it has them."""
    missing = rows - leaf.shape[0]
    if not missing:
        return leaf
    # `jnp.pad` rejects random keys; `jnp.concatenate` accepts them.
    if isinstance(leaf, jax.Array):
        return jnp.concatenate([leaf, make_zeros(leaf, (missing, *leaf.shape[1:]))])
    return copy_padded(leaf, device_dtype(leaf.dtype), rows)


def spread_rows(leaf: Leaf, own: Sequence[slice], rows: int) -> Leaf:
    """Return the rows of all replicas, padded with zeros to `rows` for each replica.

    Shapes:
        In: `[B, ...]`, with the slice of each of `R` replicas. Out: `[R*rows, ...]`.
    """
    if all(s.stop - s.start == rows for s in own):
        return leaf
    parts = [pad_rows(leaf[s], rows) for s in own]
    return jnp.concatenate(parts) if isinstance(leaf, jax.Array) else np.concatenate(parts)


def make_zeros(like: Leaf, shape: tuple[int, ...]) -> Leaf:
    """Return zeros with the dtype and kind (NumPy or JAX) of `like`.

    For random keys these are the keys whose key data is zero.
    """
    if not isinstance(like, jax.Array):
        return np.zeros(shape, device_dtype(like.dtype))
    if not jnp.issubdtype(like.dtype, jax.dtypes.extended):
        return jnp.zeros(shape, like.dtype)
    bits = jax.eval_shape(jax.random.key_data, like)
    zeros = jnp.zeros((*shape, *bits.shape[like.ndim :]), bits.dtype)
    return jax.random.wrap_key_data(zeros, impl=jax.random.key_impl(like))
