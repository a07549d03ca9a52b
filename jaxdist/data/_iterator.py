"""One pass over a distributed dataset."""

from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, TypedDict

from jaxdist._typing import PyTree
from jaxdist.data._assemble import Assembler, spec_of
from jaxdist.data._prefetch import Prefetcher
from jaxdist.data._sources import Reader
from jaxdist.errors import ArgumentError, ArgumentTypeError, ContextError, OutOfRangeError


class IteratorState(TypedDict):
    """Where a `DistributedIterator` stands."""

    steps: int  # batches that were given
    source: Any  # what the iterator of the dataset itself gave as its state


class _Producer:
    """Makes batches; the prefetch thread holds it, so it never refers to the iterator."""

    def __init__(self, reader: Reader, assemble: Assembler, step: int) -> None:
        self._reader = reader
        self._assemble = assemble
        self._step = step

    def __call__(self) -> tuple[PyTree, Any]:
        try:
            raw = self._reader.read()
        except StopIteration:
            raise
        except Exception as error:
            error.add_note(f"The dataset raised this for batch {self._step}, counted from 0.")
            raise
        batch = self._assemble(raw, self._step)
        self._step += 1
        return batch, self._reader.position()


class DistributedIterator(Iterator[PyTree]):
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
        reader: Reader,
        assembler: Callable[[], Assembler],
        *,
        depth: int,
        check_context: Callable[[], None] | None = None,
    ) -> None:
        self._reader = reader
        self._assembler = assembler
        self._depth = depth
        self._check_context = check_context
        self._spec: PyTree = None
        self._has_spec = False
        self._closed_by = ""
        self._start({"steps": 0, "source": reader.position()})

    def _start(self, state: IteratorState) -> None:
        self._state: IteratorState = state
        producer = _Producer(self._reader, self._assembler(), state["steps"])
        self._prefetcher = Prefetcher(producer, self._reader.close, depth=self._depth)

    def __iter__(self) -> "DistributedIterator":
        return self

    def __next__(self) -> PyTree:
        if self._check_context is not None:
            self._check_context()
        if self._closed_by:
            raise _is_closed(self._closed_by, self._state["steps"])
        try:
            batch, position = self._prefetcher.take()
        except StopIteration:
            raise
        except BaseException as error:
            # Ctrl-C must not wait for a source that does not answer.
            self._close(f"{type(error).__name__} ended it", waits=False)
            raise
        self._state = {"steps": self._state["steps"] + 1, "source": position}
        return batch

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
                "Loop with `for batch in dataset`, or ask get_next_as_optional().has_value()."
            ) from None

    def get_next_as_optional(self) -> "OptionalBatch":
        """The next batch if there is one; at the end, an `OptionalBatch` without a value.

        Raises:
            ContextError: The iterator was closed.
        """
        try:
            return OptionalBatch((next(self),))
        except StopIteration:
            return OptionalBatch(())

    @property
    def element_spec(self) -> PyTree:
        """Shapes and dtypes of what one replica gets of the next batch; no batch is lost.

        Raises:
            OutOfRangeError: There is no batch to tell them from.
            ContextError: The iterator was closed before its first batch.
        """
        if not self._has_spec:
            if self._closed_by:
                raise _is_closed(self._closed_by, self._state["steps"])
            try:
                batch, _ = self._prefetcher.peek()
            except StopIteration:
                raise _no_spec() from None
            self._spec, self._has_spec = spec_of(batch), True
        return self._spec

    def get_state(self) -> IteratorState:
        """Where this pass stands, whatever was read ahead; `set_state` goes back there.

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
                "DistributedIterator.get_state: this dataset cannot tell its position: its "
                "iterator has no get_state.\n\n"
                "Datasets of jaxdist.data.batches and of Grain can; for your own, give the "
                "iterator get_state() and set_state(state)."
            )
        return {"steps": self._state["steps"], "source": self._state["source"]}

    def set_state(self, state: IteratorState) -> None:
        """Go on with the batch after the last one that was given when `state` was taken.

        Raises:
            ArgumentError: `state` is not a state of a `DistributedIterator`, or of another dataset.
            ArgumentTypeError: The dataset's own iterator has no `set_state`.
        """
        if not isinstance(state, dict) or set(state) != {"steps", "source"}:
            raise ArgumentError(
                f"DistributedIterator.set_state: this is not a state: {state!r}.\n\n"
                "It takes what get_state() returned, a dict with 'steps' and 'source'."
            )
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
        self._closed_by = ""
        self._start({"steps": int(state["steps"]), "source": state["source"]})

    def close(self) -> None:
        """End the reading ahead; batches that were not taken are dropped."""
        self._close("close() was called")

    def _close(self, reason: str, *, waits: bool = True) -> None:
        self._closed_by = self._closed_by or reason
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


class OptionalBatch:
    """A batch, or the end of the data.

    Source:
        `tf.experimental.Optional`, as `get_next_as_optional` returns it.
    """

    __slots__ = ("_held",)

    def __init__(self, held: tuple[PyTree, ...]) -> None:
        self._held = held

    def has_value(self) -> bool:
        """Whether there is a batch."""
        return bool(self._held)

    def get_value(self) -> PyTree:
        """The batch.

        Raises:
            ArgumentError: There is none.
        """
        if not self._held:
            raise ArgumentError(
                "get_value() on an empty OptionalBatch: the dataset has ended.\n\n"
                "Ask has_value() first."
            )
        return self._held[0]

    def __repr__(self) -> str:
        return f"OptionalBatch({self._held[0]!r})" if self._held else "OptionalBatch(empty)"


def _no_spec() -> OutOfRangeError:
    return OutOfRangeError(
        "element_spec is read from the first batch, and the dataset has none.\n\n"
        "Check that the dataset is not empty: for a loader, its files and its filter."
    )


def _is_closed(reason: str, steps: int) -> ContextError:
    return ContextError(
        f"This DistributedIterator is closed: {reason}, after {steps} batches.\n\n"
        "Make another with iter(dataset); get_state() and set_state() go on where it was."
    )
