"""Readers that read datasets element by element and can return to a saved position."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import jax

from jaxdist._called import called, refuse
from jaxdist.data._reading.ahead import UNKNOWN_CARDINALITY, HasRowsAhead, RowsAhead
from jaxdist.errors import ArgumentTypeError, JaxdistError

Snapshot = Callable[[Any], Any]


class Reader(Protocol):
    """One pass over a dataset."""

    def read(self) -> Any:
        """Return the next element, or raise `StopIteration`."""

    def rows_ahead(self) -> list[RowsAhead] | None:
        """Return the row counts of the next elements of each source; None if one is unknown."""

    def position(self) -> Any:
        """Return the position, for `seek`; None if the dataset cannot report it."""

    def check_can_seek(self) -> None:
        """Check that `seek` is possible."""

    def seek(self, position: Any) -> None:
        """Continue the pass from `position`."""

    def close(self) -> None:
        """Release the resources of the pass."""


class SingleReader:
    """A pass over one dataset.

    Args:
        make: A function that makes the iterator of the pass.
        length: Number of elements of the dataset; used to reject positions of other datasets.
        is_own: Whether the reader closes the iterator.
    """

    def __init__(self, make: Callable[[], Iterator[Any]], length: int, *, is_own: bool) -> None:
        self._make = make
        self._length = length
        self._is_own = is_own
        self.iterator: Any = make()
        self._kind = type(self.iterator).__name__
        self._has_position = hasattr(self.iterator, "get_state")
        self._can_seek = hasattr(self.iterator, "set_state")

    def read(self) -> Any:
        """Return the next element, or raise `StopIteration`."""
        return next(self.iterator)

    def rows_ahead(self) -> list[RowsAhead] | None:
        """Return the row counts that the iterator knows; None if it knows none."""
        return [self.iterator.rows_ahead()] if isinstance(self.iterator, HasRowsAhead) else None

    def position(self) -> Any:
        """Return the state that the iterator's `get_state` returns; None without that method."""
        if not self._has_position:
            return None
        state = self.iterator.get_state()
        if self._length == UNKNOWN_CARDINALITY:
            return state
        return {"elements": self._length, "state": state}

    def check_can_seek(self) -> None:
        """Check that the iterator has a `set_state`."""
        if not self._can_seek:
            raise _cannot_seek_error(self._kind)

    @called("DistributedIterator.set_state")
    def seek(self, position: Any) -> None:
        """Continue from `position` by calling the iterator's `set_state`."""
        if self._length != UNKNOWN_CARDINALITY:
            position = _check_position(position, self._length)
        # `close` dropped the iterator if the pass had ended.
        if self.iterator is None:
            self.iterator = self._make()
        iterator: Any = self.iterator
        # The `set_state` of another library may raise any error for a state that it does not know.
        try:
            iterator.set_state(position)
        except JaxdistError:
            raise
        except Exception as error:
            raise refuse(
                f"a state that {self._kind} refused: {position!r:.200}. It raised "
                f"{type(error).__name__}: {error}",
                "A state belongs to the dataset that it was taken from.",
                "Build the dataset as it was when the state was saved, or start from the "
                "beginning.",
            ) from error

    def close(self) -> None:
        """Close an iterator that was made for this pass, and end its threads."""
        # A generator that the user passed in stays open, so that the user can read the rest.
        if self._is_own and self.iterator is not None:
            iterator, self.iterator = self.iterator, None
            close = getattr(iterator, "close", None)
            if callable(close):
                close()


class ListIterator(Iterator[Any], HasRowsAhead):
    """An iterator over a list that has `get_state` and `set_state`."""

    def __init__(self, elements: Sequence[Any]) -> None:
        self._elements = elements
        self._index = 0

    def __next__(self) -> Any:
        if self._index >= len(self._elements):
            raise StopIteration
        self._index += 1
        return self._elements[self._index - 1]

    def rows_ahead(self) -> RowsAhead:
        """Return the row counts of the remaining elements."""
        # `first_short` stays None: to find it, every element of the list would be read.
        elements, done = self._elements, self._index
        return RowsAhead(len(elements) - done, lambda i: _rows_of(elements[done + i]), None)

    def get_state(self) -> int:
        """Return the number of elements that were returned."""
        return self._index

    @called("set_state")
    def set_state(self, state: int) -> None:
        """Continue after `state` elements."""
        if not 0 <= state <= len(self._elements):
            raise refuse(
                f"the position {state}, and the list has {len(self._elements)} elements.",
                f"A position in this list is a number from 0 to {len(self._elements)}.",
                "Pass what get_state of an iterator over the same data returned.",
            )
        self._index = int(state)


class OuterReader:
    """A reader that wraps another one, and delegates all methods but `read` to it."""

    def __init__(self, inner: Reader) -> None:
        self.inner = inner

    def rows_ahead(self) -> list[RowsAhead] | None:
        """Return the row counts of the next elements; None if they are unknown."""
        return self.inner.rows_ahead()

    def position(self) -> Any:
        """Return the position of the pass."""
        return self.inner.position()

    def check_can_seek(self) -> None:
        """Check that the pass can seek."""
        self.inner.check_can_seek()

    def seek(self, position: Any) -> None:
        """Continue from `position`."""
        self.inner.seek(position)

    def close(self) -> None:
        """Close the pass."""
        self.inner.close()


class GroupReader(OuterReader):
    """A reader of groups of `count` consecutive elements; the last group may be smaller.

    Each element goes through `snapshot` before the next one is read, since a source may reuse its
    arrays. See Note [Who owns a batch].
    """

    def __init__(self, reader: Reader, count: int, snapshot: Snapshot) -> None:
        super().__init__(reader)
        self._count = count
        self._snapshot = snapshot

    def read(self) -> list[Any]:
        """Return the next group, or raise `StopIteration`."""
        # The first read is outside of `suppress`: its `StopIteration` ends the pass.
        group = [self._snapshot(self.inner.read())]
        with contextlib.suppress(StopIteration):
            while len(group) < self._count:
                group.append(self._snapshot(self.inner.read()))
        return group


class ParallelReader:
    """A reader of several passes in parallel, one element of each at a time."""

    def __init__(
        self, readers: list[SingleReader], devices: list[jax.Device | None], snapshot: Snapshot
    ) -> None:
        self._readers = readers
        self._devices = devices
        self._snapshot = snapshot

    def read(self) -> list[Any]:
        """Return one element of each pass, with `ENDED` for a pass that has ended.

        Raises:
            StopIteration: All passes have ended.
        """
        group = [self._read_one(r, d) for r, d in zip(self._readers, self._devices, strict=True)]
        if all(element is ENDED for element in group):
            raise StopIteration
        return group

    def _read_one(self, reader: SingleReader, device: jax.Device | None) -> Any:
        with use_default_device(device):
            try:
                return self._snapshot(reader.read())
            except StopIteration:
                return ENDED

    def rows_ahead(self) -> list[RowsAhead] | None:
        """Return the row counts of the next elements of each pass; None if one is unknown."""
        rows_of_passes = [r.rows_ahead() for r in self._readers]
        known = [one for of_pass in rows_of_passes if of_pass is not None for one in of_pass]
        return known if len(known) == len(self._readers) else None

    def position(self) -> Any:
        """Return the positions of all passes; None if one cannot report its position."""
        positions = [r.position() for r in self._readers]
        return None if any(p is None for p in positions) else positions

    def check_can_seek(self) -> None:
        """Check that all passes can seek."""
        for reader in self._readers:
            reader.check_can_seek()

    def seek(self, position: Any) -> None:
        """Continue from `position`."""
        for reader, one in zip(self._readers, position, strict=True):
            reader.seek(one)

    def close(self) -> None:
        """Close every pass, even if closing one of them raises."""
        with contextlib.ExitStack() as stack:
            for reader in self._readers:
                stack.callback(reader.close)


def use_default_device(device: jax.Device | None) -> contextlib.AbstractContextManager[Any]:
    """Return a context with `device` as JAX's default device; None changes nothing."""
    return contextlib.nullcontext() if device is None else jax.default_device(device)


def _rows_of(element: Any) -> int | None:
    """Return the number of rows of an element from its leaves; None if no leaf has rows."""
    # Only `.shape`, since `np.asarray` of a leaf on disk or of a tensor may read all of it.
    try:
        leaves = jax.tree.leaves(element)
    except ValueError:
        return None  # Reading the element raises the error, which names the element.
    shapes = [getattr(leaf, "shape", ()) for leaf in leaves]
    return next((int(s[0]) for s in shapes if s), None)


class _Ended:
    """A marker for the missing element of a pass that has ended."""


# Not None, since None can be an element of a dataset (an empty pytree).
ENDED = _Ended()


def _check_position(position: Any, length: int) -> Any:
    if not isinstance(position, dict) or set(position) != {"elements", "state"}:
        raise refuse(
            f"a state whose source is {position!r:.200}.",
            "The source of a state of this dataset is a dict with 'elements' and 'state'.",
            "Pass what get_state() returned.",
        )
    if position["elements"] != length:
        raise refuse(
            f"a state of a dataset of {position['elements']} elements, and this one has {length}.",
            "A state belongs to the dataset that it was taken from.",
            "Build the dataset as it was when the state was saved, or start from the beginning.",
        )
    return position["state"]


def _cannot_seek_error(kind: str) -> ArgumentTypeError:
    return ArgumentTypeError(
        f"DistributedIterator.set_state was called, and {kind} has no set_state.\n\n"
        "Lists, jaxdist.data.batches and Grain datasets can return to a position, and so can "
        "iterators with get_state and set_state.\n\n"
        "Give the iterator of your dataset get_state() and set_state(state)."
    )
