"""One pass over a distributed dataset."""

import collections
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, NoReturn, NotRequired, TypedDict, cast

import numpy as np

from jaxdist._typing import PyTree
from jaxdist._validate import shown
from jaxdist._values import BatchSource, current_binding, mark_with_steps_ahead
from jaxdist.data._optional import OptionalBatch
from jaxdist.data._prefetch import Prefetcher
from jaxdist.data._reading.assemble import (
    MAX_DROPPED_IN_A_ROW,
    Assembler,
    Dropped,
    nothing_left_error,
    spec_of,
)
from jaxdist.data._reading.readers import Reader
from jaxdist.errors import ArgumentError, ArgumentTypeError, ContextError, OutOfRangeError


class IteratorState(TypedDict):
    """Where a `DistributedIterator` stands."""

    steps: int  # batches that were given
    source: Any  # the position in the dataset itself
    dropped: NotRequired[int]  # batches that were left out before; with `DROP`
    padded_rows: NotRequired[int]  # rows of every batch; with `PAD`


_NEEDED = {"steps", "source"}
_COUNTS = ("steps", "dropped", "padded_rows")


class _Producer:
    """Makes batches; the prefetch thread holds it, so it never refers to the iterator."""

    def __init__(self, reader: Reader, assemble: Assembler, start: IteratorState) -> None:
        self._reader = reader
        self._assemble = assemble
        self._steps = start["steps"]
        self._dropped = start.get("dropped", 0)
        rows = reader.rows_ahead()
        self._ahead = assemble.uneven_steps(rows, self._steps) if rows is not None else ()

    def __call__(self) -> tuple[PyTree, IteratorState]:
        """The next batch, and the state after it."""
        for _ in range(MAX_DROPPED_IN_A_ROW):
            index = self._steps + self._dropped
            batch = self._assemble(self._read(index), index)
            if not isinstance(batch, Dropped):
                self._steps += 1
                if self._ahead:
                    mark_with_steps_ahead(batch, self._ahead)
                return batch, self._state()
            self._dropped += 1
            if batch.is_last:
                self._raise_end()
        raise nothing_left_error(MAX_DROPPED_IN_A_ROW, is_all=False)

    def _read(self, index: int) -> Any:
        try:
            return self._reader.read()
        except StopIteration:
            self._raise_end()
        except Exception as error:
            error.add_note(f"The dataset raised this for batch {index}, counted from 0.")
            raise

    def _raise_end(self) -> NoReturn:
        if self._dropped and not self._steps:
            raise nothing_left_error(self._dropped, is_all=True) from None
        raise StopIteration

    def _state(self) -> IteratorState:
        state: IteratorState = {"steps": self._steps, "source": self._reader.position()}
        if self._dropped:
            state["dropped"] = self._dropped
        if self._assemble.padded_rows:
            state["padded_rows"] = self._assemble.padded_rows
        return state


class DistributedIterator(Iterator[PyTree], BatchSource):
    """One pass over a `DistributedDataset`; `iter(dataset)` makes it.

    Also a context manager: leaving it ends the reading ahead. So do the end of the data, an
    error, `close()`, and dropping the iterator.

    Example:
        >>> strategy = MirroredStrategy(["cpu:0", "cpu:1"])
        >>> with iter(strategy.experimental_distribute_dataset([np.arange(4)])) as iterator:
        ...     print(next(iterator))
        PerReplica([0, 1], [2, 3])

    Source:
        `tf.distribute.DistributedIterator`.
    """

    def __init__(
        self,
        open_reader: Callable[[], Reader],
        assembler: Callable[[int], Assembler],
        *,
        depth: int,
        check_context: Callable[[], None] | None = None,
    ) -> None:
        self._open_reader = open_reader
        self._reader = open_reader()
        self._assembler = assembler
        self._depth = depth
        self._check_context = check_context
        self._spec: PyTree = None
        self._has_spec = False
        self._closed_reason = ""
        self._start({"steps": 0, "source": self._reader.position()})

    def _start(self, state: IteratorState) -> None:
        self._state: IteratorState = state
        # Taken for a call that failed; each with the state after it.
        self._put_back: collections.deque[tuple[PyTree, IteratorState]] = collections.deque()
        assembler = self._assembler(state.get("padded_rows", 0))
        producer = _Producer(self._reader, assembler, state)
        self._prefetcher = Prefetcher(producer, self._reader.close, depth=self._depth)

    def __iter__(self) -> "DistributedIterator":
        return self

    def __next__(self) -> PyTree:
        if self._check_context is not None:
            self._check_context()
        binding = current_binding()
        return self.take() if binding is None else binding.next_of(self)

    def take(self) -> PyTree:
        """The next batch, wherever it is asked for."""
        if self._closed_reason:
            raise _closed_error(self._closed_reason, self._state["steps"])
        try:
            batch, state = self._put_back.popleft() if self._put_back else self._prefetcher.take()
        except StopIteration:
            raise
        except BaseException as error:
            # Ctrl-C must not wait for a source that does not answer.
            self._close(f"{type(error).__name__} ended it", waits=False)
            raise
        self._state = state
        return batch

    def position(self) -> IteratorState:
        """Where it stands, whether or not the dataset can tell."""
        return self._state

    def put_back(self, taken: Sequence[tuple[PyTree, Any]], before: Any) -> None:
        """Give these batches again."""
        self._put_back.extendleft(reversed(taken))
        self._state = before

    def get_next(self) -> PyTree:
        """The next batch.

        Raises:
            OutOfRangeError: No batch is left.
            ContextError: The iterator was closed.
        """
        try:
            return next(self)
        except StopIteration:
            raise OutOfRangeError(
                f"DistributedIterator.get_next: the dataset has ended after "
                f"{self._state['steps']} batches.\n\n"
                "get_next needs a batch that is left.\n\n"
                "Loop with `for batch in dataset`, or ask get_next_as_optional().has_value()."
            ) from None

    def get_next_as_optional(self) -> OptionalBatch:
        """The next batch if there is one; at the end, an `OptionalBatch` without a value.

        Raises:
            ContextError: The iterator was closed.
        """
        try:
            return OptionalBatch((next(self),))
        except StopIteration:
            return OptionalBatch(())

    def initialize(self) -> list[Any]:
        """Begin a new pass, as the loops of version 1 do before each epoch.

        Before the first batch was given it does nothing.

        Returns:
            An empty list: there are no operations to run.

        Raises:
            ContextError: The dataset gives its elements only once; the pass goes on.

        Example:
            >>> iterator = iter(MirroredStrategy().experimental_distribute_dataset([np.arange(8)]))
            >>> for epoch in range(2):
            ...     _ = iterator.initialize()
            ...     print(sum(1 for batch in iterator))
            1
            1

        Source:
            `initialize` of the iterators of `tf.compat.v1.distribute`.
        """
        if self._closed_reason or self._state["steps"]:
            reader = self._open_reader()
            self._prefetcher.close()
            self._reader, self._closed_reason = reader, ""
            self._start({"steps": 0, "source": reader.position()})
        return []

    @property
    def element_spec(self) -> PyTree:
        """Shapes and dtypes of what replica 0 gets of the next batch; no batch is lost.

        Raises:
            OutOfRangeError: There is no batch to tell them from.
            ContextError: The iterator was closed before its first batch.
        """
        if not self._has_spec:
            if self._closed_reason:
                raise _closed_error(self._closed_reason, self._state["steps"])
            try:
                batch, _ = self._put_back[0] if self._put_back else self._prefetcher.peek()
            except StopIteration:
                raise _empty_dataset_error() from None
            self._spec, self._has_spec = spec_of(batch), True
        return self._spec

    def get_state(self) -> IteratorState:
        """Where this pass stands, whatever was read ahead; `set_state` goes back there.

        Plain values that JSON can hold, where the state of the dataset itself is (Grain's
        `DataLoader` gives bytes).

        Raises:
            ArgumentTypeError: The dataset's own iterator has no `get_state`.

        Example:
            >>> it = iter(MirroredStrategy().experimental_distribute_dataset(
            ...     jaxdist.data.batches(np.arange(32), 8)))
            >>> _ = next(it)
            >>> it.get_state()["source"]["index"]
            8

        Source:
            The `get_state` and `set_state` of Grain's iterators.
        """
        if self._state["source"] is None:
            raise ArgumentTypeError(
                "DistributedIterator.get_state was called, and the iterator of the dataset has no "
                "get_state.\n\n"
                "A position is known of lists, jaxdist.data.batches and Grain datasets, and of "
                "iterators with get_state and set_state.\n\n"
                "Give the iterator of your dataset get_state() and set_state(state)."
            )
        return self._state.copy()

    def set_state(self, state: IteratorState) -> None:
        """Go on with the batch after the last one that was given when `state` was taken.

        The number of replicas and `partial_batch` may be others: what comes next is decided by
        the position in the dataset. With `PAD`, batches have the rows that they had before,
        rounded up for another number of replicas; those of `batches(...)` have its batch size.

        Raises:
            ArgumentError: `state` is not a state of a `DistributedIterator`, or of another dataset.
            ArgumentTypeError: The dataset's own iterator has no `set_state`.
        """
        state = _check_state(state)
        self._reader.check_can_seek()
        before: IteratorState = self._state
        self._prefetcher.close()
        self._prefetcher.join()
        try:
            self._reader.seek(state["source"])
        except BaseException:
            # What was read ahead is gone, so a refused state must not leave us there.
            self._reader.seek(before["source"])
            self._start(before)
            raise
        self._closed_reason = ""
        self._start(state)

    def close(self) -> None:
        """End the reading ahead; batches that were not taken are dropped."""
        self._close("close() was called")

    def _close(self, reason: str, *, waits: bool = True) -> None:
        self._closed_reason = self._closed_reason or reason
        self._prefetcher.close(waits=waits)

    def __enter__(self) -> "DistributedIterator":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._close("its with block was left", waits=kind is not KeyboardInterrupt)


def _check_state(state: Any) -> IteratorState:
    """A copy of the state, with counts as plain ints whatever a checkpoint made of them."""
    is_state = isinstance(state, dict) and _NEEDED <= set(state) <= _NEEDED | set(_COUNTS)
    counts = {n: state[n] for n in _COUNTS if n in state} if is_state else {}
    if not is_state or not all(_is_count(n) for n in counts.values()):
        raise ArgumentError(
            f"DistributedIterator.set_state was given state={shown(state)}.\n\n"
            "A state is a dict with 'steps' and 'source'.\n\nPass what get_state() returned."
        )
    return cast(IteratorState, {**state, **{name: int(n) for name, n in counts.items()}})


def _is_count(value: Any) -> bool:
    is_int = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    return is_int and int(value) >= 0


def _empty_dataset_error() -> OutOfRangeError:
    return OutOfRangeError(
        "DistributedIterator.element_spec was read, and the dataset has no batch.\n\n"
        "The spec is that of the first batch.\n\n"
        "Check that the dataset is not empty: for a loader, its files and its filter."
    )


def _closed_error(reason: str, steps: int) -> ContextError:
    return ContextError(
        f"This DistributedIterator is closed: {reason}, after {steps} batches.\n\n"
        "A closed iterator gives no batches.\n\n"
        "Make another with iter(dataset). To continue where this one was, pass its get_state() to "
        "set_state() of the other."
    )
