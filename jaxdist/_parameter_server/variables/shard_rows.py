"""Which rows of a sharded variable are on which shard, and reading them there, also by index."""

import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist._called import refuse
from jaxdist._validate import show
from jaxdist._values import IndexedSlices, Scatter, get_elements
from jaxdist.errors import RowIndexError

# The id of a change that is not for this shard. A negative id of a user is refused all the same.
NO_ROW = int(np.iinfo(np.int32).min)


def read_some(shard: Any, rows: Any) -> Any:
    """Return rows of one shard. `read_rows` moves only these rows from another machine."""
    read = getattr(shard, "read_rows", None) or shard.sparse_read
    return read(rows)


def read_rows(shards: Sequence[Any], starts: np.ndarray, ids: np.ndarray) -> Any:
    """Return the rows `ids` `[n]`, in this order; each row is read once."""
    wanted, places = np.unique(ids, return_inverse=True)
    on = np.searchsorted(starts, wanted, side="right") - 1
    parts = [
        read_some(shard, wanted[on == number] - starts[number])
        for number, shard in enumerate(shards)
        if (on == number).any()
    ]
    rows = join(parts) if parts else jnp.asarray(shards[0].value())[:0]
    is_sorted = len(wanted) == len(ids) and bool((places == np.arange(len(ids))).all())
    return rows if is_sorted else rows[places]


def select_rows(shards: Sequence[Any], starts: np.ndarray, ids: Any) -> Any:
    """Return rows by traced ids: each shard is read at all of them, and the right one is kept.

    For the ids of other shards a shard is read at its row 0. As in JAX, an index out of bounds
    gives nan (or the smallest integer).
    """
    ids = _as_row_numbers(ids)
    if hasattr(shards[0], "read_rows"):
        return _select_remote_rows(shards, starts, ids)
    dtype = shards[0].dtype
    missing = jnp.take(jnp.zeros((1,), dtype), 1, mode="fill")
    found = jnp.full((*ids.shape, *shards[0].shape[1:]), missing)
    for shard, start in zip(shards, starts.tolist(), strict=True):
        is_own, own = _find_own(shard, start, ids)
        own = jnp.where(is_own, own, 0)
        rows = jnp.take(shard.value(), own, axis=0)
        is_own = is_own.reshape(ids.shape + (1,) * (found.ndim - ids.ndim))
        found = jnp.where(is_own, rows, found)
    return found


def _select_remote_rows(shards: Sequence[Any], starts: np.ndarray, ids: Any) -> Any:
    """Return rows by traced ids from shards on other machines, which move only rows asked for.

    A shard is asked for its first row instead of rows of other shards, so that row moves once more.
    An id out of bounds goes to the first or last shard, which refuses it.
    """
    found: Any = None
    for number, (shard, start) in enumerate(zip(shards, starts.tolist(), strict=True)):
        is_own = _is_own(ids, number, shards, start)
        rows = read_some(shard, jnp.where(is_own, ids - start, 0))
        place = is_own.reshape(is_own.shape + (1,) * (rows.ndim - is_own.ndim))
        found = rows if found is None else jnp.where(place, rows, found)
    return found


def _as_row_numbers(ids: Any) -> Any:
    """Return traced ids as int32, in which the first row of any shard can be subtracted.

    An int8 cannot hold the first row of a shard, and a comparison of both would wrap around. A
    larger integer that an int32 cannot hold becomes one that is out of bounds as well.
    """
    known = jnp.iinfo(ids.dtype)
    # `NO_ROW` itself is no id of a user.
    low, high = max(known.min, NO_ROW + 1), min(known.max, int(np.iinfo(np.int32).max))
    return jnp.clip(ids, low, high).astype(jnp.int32)


def _is_own(ids: Any, number: int, shards: Sequence[Any], start: int) -> Any:
    """Whether traced ids are of one shard; those out of bounds are of the first or last one."""
    is_own = jnp.ones(jnp.shape(ids), bool)
    if number > 0:
        is_own &= ids >= start
    if number < len(shards) - 1:
        is_own &= ids < start + int(shards[number].shape[0])
    return is_own


def read_progression(shards: Sequence[Any], starts: np.ndarray, rows: range) -> Any:
    """Return the rows of a slice; only shards that have some of them are read."""
    step = abs(rows.step)
    ahead = rows if rows.step > 0 else rows[::-1]
    parts = []
    for shard, start in zip(shards, starts.tolist(), strict=True):
        size = int(shard.shape[0])
        # The first row of the progression that is not before this shard.
        first = ahead.start + max(0, -(-(start - ahead.start) // step)) * step
        stop = min(ahead.stop, start + size)
        if not ahead or first >= stop:
            continue
        own = slice(first - start, stop - start, step)
        is_remote = hasattr(shard, "read_rows")
        is_whole = own == slice(0, size, 1)
        if is_remote and not is_whole:
            parts.append(read_some(shard, np.arange(own.start, own.stop, step)))
        else:
            parts.append(shard.value() if is_whole else shard.value()[own])
    found = join(parts) if parts else jnp.zeros((0, *shards[0].shape[1:]), shards[0].dtype)
    return found if rows.step > 0 else found[::-1]


def join(parts: Sequence[Any]) -> Any:
    """Return parts as one array along dim 0, on the devices of the first part."""
    arrays = [jnp.asarray(part) for part in parts]
    if len(arrays) == 1:
        return arrays[0]
    if not any(isinstance(x, jax.core.Tracer) for x in arrays):
        first = arrays[0].sharding
        if any(x.sharding.device_set != first.device_set for x in arrays):
            arrays = [jax.device_put(x, first) for x in arrays]
    return jnp.concatenate(arrays)


def split_slices(
    kind: Scatter, slices: IndexedSlices, shards: Sequence[Any], starts: np.ndarray
) -> list[tuple[Any, IndexedSlices]]:
    """Return the shards that a change of rows concerns, with the rows for each of them."""
    if isinstance(slices.indices, jax.core.Tracer):
        return [
            (shard, IndexedSlices(slices.values, _local_ids(slices.indices, n, shards, start)))
            for n, (shard, start) in enumerate(zip(shards, starts.tolist(), strict=True))
        ]
    ids = np.asarray(slices.indices)
    on = np.searchsorted(starts, ids, side="right") - 1
    found = []
    for number, shard in enumerate(shards):
        places = np.flatnonzero(on == number)
        if len(places):
            own = slices.values if len(places) == len(ids) else slices.values[places]
            found.append((shard, _sum_repeated(kind, own, ids[places] - starts[number])))
    return found


def _local_ids(ids: Any, number: int, shards: Sequence[Any], start: int) -> Any:
    """Return traced ids as those of a shard, with an id that drops the change for other shards."""
    ids = _as_row_numbers(ids)
    if hasattr(shards[number], "read_rows"):
        # The worker that sends the change drops rows with this id.
        return jnp.where(_is_own(ids, number, shards, start), ids - start, NO_ROW)
    is_own, own = _find_own(shards[number], start, ids)
    # JAX drops the changes of ids that are too large.
    return jnp.where(is_own, own, int(shards[number].shape[0]))


def _find_own(shard: Any, start: int, ids: Any) -> tuple[Any, Any]:
    """Return which traced ids are rows of a shard, and all of them counted from its first row."""
    own = ids - start
    return (own >= 0) & (own < int(shard.shape[0])), own


def _sum_repeated(kind: Scatter, values: Any, ids: np.ndarray) -> IndexedSlices:
    """Return rows to add with each index once, so that fewer of them are sent to a server."""
    wanted, places = np.unique(ids, return_inverse=True)
    if kind not in (Scatter.ADD, Scatter.SUBTRACT) or len(wanted) == len(ids):
        return IndexedSlices(values, ids)
    total = jnp.zeros((len(wanted), *values.shape[1:]), values.dtype).at[places].add(values)
    return IndexedSlices(total, wanted)


def read_index(variable: Any, shards: Sequence[Any], starts: np.ndarray, index: Any) -> jax.Array:
    """Return `variable[index]`; where the index begins with rows, only these rows are read."""
    # An empty tuple is an index of the whole, as an ellipsis.
    parts: tuple[Any, ...] = (index or (Ellipsis,)) if isinstance(index, tuple) else (index,)
    first, rest = parts[0], parts[1:]
    count = int(variable.shape[0])
    if isinstance(first, slice) and _is_known(first):
        rows = _read_slice(first, count)
        found = read_progression(shards, starts, rows)
        return get_elements(found, (slice(None), *rest))
    is_array = hasattr(first, "dtype") and not isinstance(first, jax.core.Tracer)
    if is_array and first.dtype.kind in "iu" and first.ndim:
        ids = _count_from_start(np.asarray(first), count)
        wanted, places = np.unique(ids, return_inverse=True)
        found = read_rows(shards, starts, wanted)
        return get_elements(found, (places.reshape(ids.shape), *rest))
    number = _as_integer(first)
    if number is not None:
        row = _count_from_start(np.asarray([number]), count)
        # Taken with the index 0 of one row: an integer beside arrays is one of the arrays.
        return get_elements(read_rows(shards, starts, row), (0, *rest))
    # A mask, an ellipsis, a new axis, or traced rows: an index of the whole.
    return get_elements(variable.value(), index)


def _read_slice(given: slice, count: int) -> range:
    try:
        return range(*given.indices(count))
    except (TypeError, ValueError) as error:
        raise refuse(
            f"index={show(given)}: {error}.",
            "A slice has integers or None, and a step that is not 0.",
            "Pass for instance variable[0:2].",
        ) from None


def _count_from_start(rows: np.ndarray, count: int) -> np.ndarray:
    """Return row numbers without negative ones, which count from the end."""
    wrong = rows[(rows < -count) | (rows >= count)]
    if wrong.size:
        raise refuse(
            f"index={int(wrong.flat[0])} for dim 0, and the variable has {count} row(s).",
            "An index is a row from 0, or from the end, where the last one is -1.",
            f"Pass an index from {-count} to {count - 1}.",
            kind=RowIndexError,
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
