"""What a user may give as a dataset, and reading it element by element."""

import contextlib
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol, cast

import jax
import numpy as np

from jaxdist.data._batches import Batches
from jaxdist.data._cardinality import UNKNOWN_CARDINALITY, cardinality_of
from jaxdist.errors import ArgumentTypeError, ContextError

Keep = Callable[[Any], Any]


class Reader(Protocol):
    """One pass over a dataset."""

    def read(self) -> Any:
        """The next element, or `StopIteration`."""

    def position(self) -> Any:
        """What `seek` takes to come back here; None where the dataset cannot tell."""

    def check_can_seek(self) -> None:
        """Refuse where `seek` is not possible."""

    def seek(self, position: Any) -> None:
        """Go where `position` was taken."""

    def close(self) -> None:
        """Let go of what the pass holds."""


class Source:
    """A user's dataset; each `open` is a new pass over it."""

    def __init__(self, caller: str, dataset: Any) -> None:
        check_dataset(caller, dataset)
        self._caller = caller
        # A dataset of ours counts epochs; two strategies that share one count apart.
        self._dataset: Any = dataset.restarted() if isinstance(dataset, Batches) else dataset
        self._is_one_shot = isinstance(dataset, Iterator) and iter(dataset) is dataset
        self._is_spent = False

    @property
    def gives_up_memory(self) -> bool:
        """Whether nobody else refers to the arrays of an element."""
        return isinstance(self._dataset, Batches)

    @property
    def cardinality(self) -> int:
        """Elements of one pass."""
        if self._is_one_shot or not isinstance(self._dataset, Iterable):
            return UNKNOWN_CARDINALITY
        return cardinality_of(self._dataset)

    def open(self) -> "SingleReader":
        """Begin a pass."""
        if self._is_one_shot:
            if self._is_spent:
                raise _spent(self._caller, self._dataset)
            self._is_spent = True
            return SingleReader(self._dataset, is_own=False)
        make = self._dataset if not isinstance(self._dataset, Iterable) else None
        return SingleReader(iter(self._dataset if make is None else make()), is_own=True)

    def __repr__(self) -> str:
        if isinstance(self._dataset, Batches):
            return repr(self._dataset)
        return type(self._dataset).__name__


class SingleReader:
    """A pass over one dataset."""

    def __init__(self, iterator: Iterator[Any], *, is_own: bool) -> None:
        self._iterator = iterator
        # A generator that the user handed over stays the user's, open where we stopped.
        self._closes = is_own and isinstance(iterator, types.GeneratorType)

    def read(self) -> Any:
        """The next element, or `StopIteration`."""
        return next(self._iterator)

    def position(self) -> Any:
        """What the iterator's own `get_state` gives; None where it has none."""
        get_state = getattr(self._iterator, "get_state", None)
        return None if get_state is None else get_state()

    def check_can_seek(self) -> None:
        """Refuse where the iterator has no `set_state`."""
        if not hasattr(self._iterator, "set_state"):
            raise _cannot_seek(self._iterator)

    def seek(self, position: Any) -> None:
        """Go where `position` was taken, by the iterator's own `set_state`."""
        cast(Any, self._iterator).set_state(position)

    def close(self) -> None:
        """Close a generator that was made for this pass."""
        if self._closes:
            cast(Any, self._iterator).close()


class GroupReader:
    """Elements `count` at a time, in order, from one pass; fewer in the last group.

    Each goes through `keep` before the next is asked for, since a source may use its arrays
    again.
    """

    def __init__(self, reader: SingleReader, count: int, keep: Keep) -> None:
        self._reader = reader
        self._count = count
        self._keep = keep

    def read(self) -> list[Any]:
        """The next group, or `StopIteration`."""
        group = [self._keep(self._reader.read())]
        with contextlib.suppress(StopIteration):
            while len(group) < self._count:
                group.append(self._keep(self._reader.read()))
        return group

    def position(self) -> Any:
        """The position of the pass."""
        return self._reader.position()

    def check_can_seek(self) -> None:
        """Refuse where the pass cannot."""
        self._reader.check_can_seek()

    def seek(self, position: Any) -> None:
        """Go where `position` was taken."""
        self._reader.seek(position)

    def close(self) -> None:
        """Close the pass."""
        self._reader.close()


class ParallelReader:
    """One element of each of several passes at a time; fewer where some have ended."""

    def __init__(
        self, readers: list[SingleReader], devices: list[jax.Device | None], keep: Keep
    ) -> None:
        self._readers = readers
        self._devices = devices
        self._keep = keep

    def read(self) -> list[Any]:
        """One element of each pass, None where it has ended; `StopIteration` where all have."""
        group = [self._read_one(r, d) for r, d in zip(self._readers, self._devices, strict=True)]
        if all(element is ENDED for element in group):
            raise StopIteration
        return group

    def _read_one(self, reader: SingleReader, device: jax.Device | None) -> Any:
        with jax.default_device(device) if device is not None else contextlib.nullcontext():
            try:
                return self._keep(reader.read())
            except StopIteration:
                return ENDED

    def position(self) -> Any:
        """The positions of all passes; None where one cannot tell."""
        positions = [r.position() for r in self._readers]
        return None if any(p is None for p in positions) else positions

    def check_can_seek(self) -> None:
        """Refuse where one pass cannot."""
        for reader in self._readers:
            reader.check_can_seek()

    def seek(self, position: Any) -> None:
        """Go where `position` was taken."""
        for reader, one in zip(self._readers, position, strict=True):
            reader.seek(one)

    def close(self) -> None:
        """Close every pass, also where closing one fails."""
        with contextlib.ExitStack() as stack:
            for reader in self._readers:
                stack.callback(reader.close)


class _Ended:
    """Stands for the element of a pass that has ended."""


ENDED = _Ended()


def check_dataset(caller: str, dataset: Any) -> None:
    """Refuse what is not a dataset, or is one example of a common mistake."""
    if isinstance(dataset, (np.ndarray, jax.Array, Mapping, tuple)):
        what = f"{type(dataset).__name__}"
        raise ArgumentTypeError(
            f"{caller} takes an iterable of batches, and one {what} was given.\n\n"
            f"A {what} could be one batch, or all the data, or a row of batches.\n\n"
            "For arrays that hold all the data use jaxdist.data.batches(arrays, batch_size); "
            "for batches that exist already, a list of them."
        )
    if isinstance(dataset, (str, bytes)) or not (
        isinstance(dataset, Iterable) or callable(dataset)
    ):
        raise ArgumentTypeError(
            f"{caller} takes an iterable of batches, and {type(dataset).__name__} was given: "
            f"{dataset!r}.\n\n"
            "Pass a list of batches, an object with __iter__ (a loader, a tf.data or Grain "
            "dataset), a generator function, or jaxdist.data.batches(arrays, batch_size)."
        )
    if not isinstance(dataset, Iterable):
        _check_needs_no_arguments(caller, dataset)


def _check_needs_no_arguments(caller: str, function: Callable[..., Any]) -> None:
    try:
        inspect.signature(function).bind()
    except ValueError:  # a builtin without a signature
        return
    except TypeError as error:
        raise ArgumentTypeError(
            f"{caller} was given the function {getattr(function, '__name__', function)!r}, and "
            f"calls it without arguments for each pass: {error}.\n\n"
            "A function of an InputContext belongs in "
            "strategy.distribute_datasets_from_function(dataset_fn)."
        ) from None


def _spent(caller: str, dataset: Any) -> ContextError:
    name = getattr(dataset, "__name__", type(dataset).__name__)
    return ContextError(
        f"{caller}: this dataset was passed over already, and {name} of type "
        f"{type(dataset).__name__} gives its elements only once.\n\n"
        "Pass something that can begin anew: the generator function itself instead of its "
        "result, a list, or an object whose __iter__ makes a new iterator."
    )


def _cannot_seek(iterator: Any) -> ArgumentTypeError:
    return ArgumentTypeError(
        "DistributedIterator.set_state: this dataset cannot go back to a position: "
        f"{type(iterator).__name__} has no set_state.\n\n"
        "Datasets of jaxdist.data.batches and of Grain can; for your own, give the iterator "
        "get_state() and set_state(state)."
    )
