"""`variable[index]` of a sharded variable: what NumPy gives, from the shards that have it."""

import operator
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxdist._parameter_server.variables import shard_rows
from jaxdist._validate import show
from jaxdist._values import get_elements
from jaxdist.errors import ArgumentError, RowIndexError


def read_index(
    caller: str, variable: Any, shards: Sequence[Any], starts: np.ndarray, index: Any
) -> jax.Array:
    """Return `variable[index]`; where the index begins with rows, only these rows are read."""
    # An empty tuple is an index of the whole, as an ellipsis.
    parts: tuple[Any, ...] = (index or (Ellipsis,)) if isinstance(index, tuple) else (index,)
    first, rest = parts[0], parts[1:]
    count = int(variable.shape[0])
    if isinstance(first, slice) and _is_known(first):
        rows = _read_slice(caller, first, count)
        found = shard_rows.read_progression(shards, starts, rows)
        return get_elements(caller, found, (slice(None), *rest))
    is_array = hasattr(first, "dtype") and not isinstance(first, jax.core.Tracer)
    if is_array and first.dtype.kind in "iu" and first.ndim:
        ids = _count_from_start(caller, np.asarray(first), count)
        wanted, places = np.unique(ids, return_inverse=True)
        found = shard_rows.read_rows(shards, starts, wanted)
        return get_elements(caller, found, (places.reshape(ids.shape), *rest))
    number = _as_integer(first)
    if number is not None:
        row = _count_from_start(caller, np.asarray([number]), count)
        # Taken with the index 0 of one row: an integer beside arrays is one of the arrays.
        return get_elements(caller, shard_rows.read_rows(shards, starts, row), (0, *rest))
    # A mask, an ellipsis, a new axis, or traced rows: an index of the whole.
    return get_elements(caller, variable.value(), index)


def _read_slice(caller: str, given: slice, count: int) -> range:
    try:
        return range(*given.indices(count))
    except (TypeError, ValueError) as error:
        raise ArgumentError(
            f"{caller} was given index={show(given)}: {error}.\n\n"
            "A slice has integers or None, and a step that is not 0.\n\n"
            "Pass for instance variable[0:2]."
        ) from None


def _count_from_start(caller: str, rows: np.ndarray, count: int) -> np.ndarray:
    """Return row numbers without negative ones, which count from the end."""
    wrong = rows[(rows < -count) | (rows >= count)]
    if wrong.size:
        raise RowIndexError(
            f"{caller} was given index={int(wrong.flat[0])} for dim 0, and the variable has "
            f"{count} row(s).\n\n"
            "An index is a row from 0, or from the end, where the last one is -1.\n\n"
            f"Pass an index from {-count} to {count - 1}."
        )
    return np.where(rows < 0, rows + count, rows)


def _is_known(given: slice) -> bool:
    parts = (given.start, given.stop, given.step)
    return not any(isinstance(part, jax.core.Tracer) for part in parts)


def _as_integer(value: Any) -> int | None:
    if isinstance(value, (bool, np.bool_, jax.core.Tracer)):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None
