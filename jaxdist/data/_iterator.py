"""One pass over a distributed dataset."""

from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, TypedDict

from jaxdist._typing import PyTree
from jaxdist.data._assemble import Assembler
from jaxdist.data._errors import OutOfRangeError
from jaxdist.data._prefetch import Prefetcher
from jaxdist.data._sources import Reader
from jaxdist.errors import ArgumentError, ArgumentTypeError, ContextError


class IteratorState(TypedDict):
    """Where a `DistributedIterator` stands."""

    steps: int  # batches that were given
    source: Any  # what the dataset's own iterator gave as its state


class _Producer:
    """Makes batches; it is what the prefetch thread holds, so it never refers to the iterator."""

    def __init__(self, reader: Reader, assemble: Assembler, step: int) -> None:
        self._reader = reader
        self._assemble = assemble
        self._step = step

    def __call__(self) -> tuple[PyTree, Any, PyTree]:
        try:
            raw = self._reader.read()
            batch = self._assemble(raw, self._step)
        except StopIteration:
            raise
        except Exception as error:
            error.add_note(f"while the dataset made batch {self._step} (counted from 0)")
            raise
        self._step += 1
        return batch, self._reader.position()
