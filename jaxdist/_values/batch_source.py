"""The interface of an iterator whose batches a compiled `jaxdist.function` may take."""

import abc
from collections.abc import Sequence
from typing import Any

from jaxdist._typing import PyTree


class BatchSource(abc.ABC):
    """An iterator over batches that accepts unused batches back."""

    @abc.abstractmethod
    def take(self) -> PyTree:
        """Return the next batch.

        Raises:
            StopIteration: No batch is left.
        """

    @abc.abstractmethod
    def position(self) -> Any:
        """Return the current position, which `put_back` accepts."""

    @abc.abstractmethod
    def put_back(self, taken: Sequence[tuple[PyTree, Any]], before: Any) -> None:
        """Take back batches, so that `take` returns them again.

        Args:
            taken: The batches that were taken last, each with the position after it.
            before: The position before the first of them.
        """
