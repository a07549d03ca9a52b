"""What a function that is compiled as a whole may take batches from."""

import abc
from collections.abc import Sequence
from typing import Any

from jaxdist._typing import PyTree


class BatchSource(abc.ABC):
    """Gives batches one after the other, and takes back those that were not used."""

    @abc.abstractmethod
    def take(self) -> PyTree:
        """The next batch.

        Raises:
            StopIteration: There is none.
        """

    @abc.abstractmethod
    def position(self) -> Any:
        """Where it stands."""

    @abc.abstractmethod
    def put_back(self, taken: Sequence[tuple[PyTree, Any]], before: Any) -> None:
        """Give batches again.

        Args:
            taken: Those that were taken last, each with the position after it.
            before: The position before the first of them.
        """
