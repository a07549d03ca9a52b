"""One pass over a distributed dataset."""

import collections
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, NoReturn, NotRequired, TypedDict, cast

import numpy as np

from jaxdist._called import called, refuse
from jaxdist._typing import PyTree
from jaxdist._validate import show
from jaxdist._values import BatchSource, current_binding, mark_with_steps_ahead
from jaxdist.data._assembler import Assembler
from jaxdist.data._context import OptionalBatch
from jaxdist.data._prefetch import Prefetcher
from jaxdist.data._reading.partial_batch import (
    MAX_DROPPED_IN_A_ROW,
    Dropped,
    nothing_left_error,
    spec_of,
)
from jaxdist.data._reading.readers import ENDED, Reader
from jaxdist.errors import ArgumentTypeError, ContextError, OutOfRangeError

# Note [State of a batch]
# The prefetch thread reads ahead, so the position of the reader is not the position of the loop.
# Therefore the producer returns each batch together with the state after it, and both pass through
# the queue. `get_state` returns the state of the last batch that the loop took, however many
# batches are in the queue.


class IteratorState(TypedDict):
    """The position of a `DistributedIterator`. See Note [State of a batch]."""

    steps: int  # batches that were returned
    source: Any  # the position in the dataset itself
    dropped: NotRequired[int]  # batches dropped so far; with `DROP`
    padded_rows: NotRequired[int]  # rows of every batch; with `PAD`. See Note [One padded size]


_NEEDED = {"steps", "source"}
_COUNTS = ("steps", "dropped", "padded_rows")


class _Producer:
    """A function that makes batches; the prefetch thread calls it.

    It never refers to the iterator. See Note [No reference to the consumer].
    """

    def __init__(self, reader: Reader, assemble: Assembler, start: IteratorState) -> None:
        self._reader = reader
        self._assemble = assemble
        self._steps = start["steps"]
        self._dropped = start.get("dropped", 0)
        # Computed once for a pass, before the thread moves the reader.
        rows = reader.rows_ahead()
        self._ahead = assemble.uneven_steps(rows, self._steps) if rows is not None else ()

    def __call__(self) -> tuple[PyTree, IteratorState]:
        """Return the next batch, and the state after it."""
        for _ in range(MAX_DROPPED_IN_A_ROW):
            index = self._steps + self._dropped
            try:
                batch = self._assemble(self._read(index), index)
            except StopIteration:
                raise
            except BaseException as error:
                # Other processes wait for the rows of this one.
                self._assemble.leave(f"{type(error).__name__}: {error}".partition("\n")[0])
                raise
            if batch is ENDED:
                self._raise_end()
            if not isinstance(batch, Dropped):
                self._steps += 1
                # See Note [Batches to come]
                if self._ahead:
                    mark_with_steps_ahead(batch, self._ahead)
                return batch, self._state()
            self._dropped += 1
            if batch.is_last:
                self._raise_end()
        raise nothing_left_error(MAX_DROPPED_IN_A_ROW, is_all=False)

    def finish(self) -> None:
        """Close the pass; the producer is not called again."""
        self._assemble.leave("it reads no further batches")
        self._reader.close()

    def _read(self, index: int) -> Any:
        try:
            return self._reader.read()
        except StopIteration:
            self._raise_end()
        except Exception as error:
            error.add_note(f"The dataset raised this for batch {index}, counted from 0.")
            raise

    def _raise_end(self) -> NoReturn:
        # A pass without a single batch would look like training that has finished.
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

    It is also a context manager. Leaving the `with` block stops prefetching. The end of the data,
    an error, `close()`, and deleting the iterator stop it too.

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
        assembler: Callable[[Any, int], Assembler],
        *,
        depth: int,
        check_context: Callable[[], None] | None = None,
    ) -> None:
        self._open_reader = open_reader
        self._reader = open_reader()
        self._assembler = assembler
        self._depth = depth
        self._check_context = check_context
        # A spec is never None, since every batch has at least one array.
        self._spec: PyTree = None
        self._closed_reason = ""
        self._start({"steps": 0, "source": self._reader.position()})

    def _start(self, state: IteratorState) -> None:
        self._state: IteratorState = state
        # Batches that a failed call took and gave back, each with the state after it.
        self._put_back: collections.deque[tuple[PyTree, IteratorState]] = collections.deque()
        assembler = self._assembler(self._reader, state.get("padded_rows", 0))
        producer = _Producer(self._reader, assembler, state)
        self._prefetcher = Prefetcher(
            producer, producer.finish, depth=self._depth, interrupt=assembler.stop_waiting
        )
        assembler.count_waits_from(self._prefetcher.find_needed_since())

    def __iter__(self) -> "DistributedIterator":
        return self

    def __next__(self) -> PyTree:
        if self._check_context is not None:
            self._check_context()
        # A function that is compiled as a whole takes its batches as inputs, so inside of it the
        # binding decides what `next` returns (a tracer while tracing).
        binding = current_binding()
        return self.take() if binding is None else binding.next_batch(self)

    def take(self) -> PyTree:
        """Return the next batch, in any context."""
        if self._closed_reason:
            raise _closed_error(self._closed_reason, self._state["steps"])
        try:
            batch, state = self._put_back.popleft() if self._put_back else self._prefetcher.take()
        except StopIteration:
            raise
        except BaseException as error:
            # Do not wait: after Ctrl-C, a blocked source would block the program.
            self._close(f"{type(error).__name__} ended it", waits=False)
            raise
        self._state = state
        return batch

    def position(self) -> IteratorState:
        """Return the state, even if the dataset cannot report its position."""
        return self._state

    def put_back(self, taken: Sequence[tuple[PyTree, Any]], before: Any) -> None:
        """Put back batches, so that they are returned again."""
        self._put_back.extendleft(reversed(taken))
        self._state = before

    def get_next(self) -> PyTree:
        """Return the next batch.

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
                "get_next needs another batch.\n\n"
                "Loop with `for batch in dataset`, or check get_next_as_optional().has_value()."
            ) from None

    def get_next_as_optional(self) -> OptionalBatch:
        """Return the next batch; at the end of the data, an `OptionalBatch` without a value.

        Raises:
            ContextError: The iterator was closed.
        """
        try:
            return OptionalBatch((next(self),))
        except StopIteration:
            return OptionalBatch(())

    def initialize(self) -> list[Any]:
        """Start a new pass, as loops of TensorFlow 1 do before each epoch.

        Before the first batch this does nothing.

        Returns:
            An empty list, since there are no operations to run.

        Raises:
            ContextError: The dataset can be read only once; the current pass continues.

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
            # Open first: if the dataset can be read only once, this raises and the current pass
            # stays usable.
            reader = self._open_reader()
            self._prefetcher.close()
            self._reader, self._closed_reason = reader, ""
            self._start({"steps": 0, "source": reader.position()})
        return []

    @property
    def element_spec(self) -> PyTree:
        """Shapes and dtypes of replica 0's part of the next batch; no batch is lost.

        Raises:
            OutOfRangeError: The dataset has no batch.
            ContextError: The iterator was closed before its first batch.
        """
        if self._spec is None:
            if self._closed_reason:
                raise _closed_error(self._closed_reason, self._state["steps"])
            try:
                batch, _ = self._put_back[0] if self._put_back else self._prefetcher.peek()
            except StopIteration:
                raise _empty_dataset_error() from None
            self._spec = spec_of(batch)
        return self._spec

    def get_state(self) -> IteratorState:
        """Return the position after the last batch that was returned; `set_state` restores it.

        Prefetched batches do not count. The state consists of plain values that JSON can hold if
        the state of the dataset itself does (Grain's `DataLoader` returns bytes).

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
                "A position is known for lists, jaxdist.data.batches and Grain datasets, and for "
                "iterators with get_state and set_state.\n\n"
                "Give the iterator of your dataset get_state() and set_state(state)."
            )
        return self._state.copy()

    def set_state(self, state: IteratorState) -> None:
        """Continue with the batch after the last one that was returned when `state` was taken.

        The number of replicas and `partial_batch` may differ: the position in the dataset decides
        which batch is next. With `PAD`, batches keep their number of rows, rounded up to a
        multiple of the number of replicas; batches of `batches(...)` have its batch size.

        Raises:
            ArgumentError: `state` is not a state of a `DistributedIterator`, or of another dataset.
            ArgumentTypeError: The dataset's own iterator has no `set_state`.
        """
        state = _check_state(state)
        self._reader.check_can_seek()
        before: IteratorState = self._state
        # `close` waits only a few seconds. `join` waits until the thread has ended, since a
        # thread that still reads would move the reader after the seek.
        self._prefetcher.close()
        self._prefetcher.join()
        try:
            self._reader.seek(state["source"])
        except BaseException:
            # The prefetched batches are lost, and the reader is past them. Return to the old
            # position, so that a rejected state changes nothing.
            self._reader.seek(before["source"])
            self._start(before)
            raise
        self._closed_reason = ""
        self._start(state)

    def close(self) -> None:
        """Stop prefetching; batches that were not taken are dropped."""
        self._close("close() was called")

    def _close(self, reason: str, *, waits: bool = True) -> None:
        # The first reason is the cause; `with` closes again after an error.
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


@called("DistributedIterator.set_state")
def _check_state(state: Any) -> IteratorState:
    """Check a state, and return a copy whose counts are plain ints."""
    # A checkpoint may have turned ints into NumPy scalars.
    is_state = isinstance(state, dict) and _NEEDED <= set(state) <= _NEEDED | set(_COUNTS)
    counts = {n: state[n] for n in _COUNTS if n in state} if is_state else {}
    if not is_state or not all(_is_count(n) for n in counts.values()):
        raise refuse(
            f"state={show(state)}.",
            "A state is a dict with 'steps' and 'source'.",
            "Pass what get_state() returned.",
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
        "A closed iterator returns no batches.\n\n"
        "Create another with iter(dataset). To continue where this one was, pass its get_state() "
        "to set_state() of the other."
    )
