"""The base class of `Splitter` and `Grouper`, which turn elements into batches of a strategy."""

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jaxdist._typing import PyTree
from jaxdist._values import Ahead
from jaxdist.data._pad import FixedRows
from jaxdist.data._place import Placer
from jaxdist.data._reading.ahead import RowsAhead
from jaxdist.data._reading.assemble import Drops
from jaxdist.data._reading.elements import ElementReader
from jaxdist.data._reading.partial_batch import PartialBatch


@dataclasses.dataclass(eq=False)
class Assembler(abc.ABC):
    """A function that makes the batch of one step from the elements that a reader read.

    Args:
        read: Reads the arrays of an element, and checks its structure.
        placer: Copies leaves to the devices.
        num_replicas: Replicas that take a part of each batch.
        policy: What to do with a step whose elements the replicas cannot share evenly.
        drops: Logs steps that are dropped.
        fixed: The number of rows that padded batches have.
    """

    read: ElementReader
    placer: Placer
    num_replicas: int
    policy: PartialBatch
    drops: Drops
    fixed: FixedRows

    @property
    def padded_rows(self) -> int:
        """Rows to which every batch is padded; 0 without padding, or if that is not known yet."""
        return self.fixed.rows if self.policy is PartialBatch.PAD else 0

    def uneven_steps(self, ahead: Sequence[RowsAhead], done: int) -> Ahead:
        """Return the uneven steps of a pass with these elements left, after `done` steps."""
        if self.policy is not PartialBatch.UNEVEN or self.num_replicas == 1:
            return ()
        return self._find_uneven(ahead, done)

    @abc.abstractmethod
    def _find_uneven(self, ahead: Sequence[RowsAhead], done: int) -> Ahead:
        """Return the steps in which replicas get different numbers of rows."""

    @abc.abstractmethod
    def __call__(self, raw: Any, index: int) -> PyTree:
        """Return the batch made from the reader's result number `index`, `Dropped` or `ENDED`."""

    def leave(self, reason: str) -> None:  # noqa: B027
        """Tell other processes that this one has stopped reading."""

    def count_waits_from(self, needed_since: Callable[[], float | None]) -> None:  # noqa: B027
        """Count time spent waiting for other processes only once the loop needs a batch."""

    def stop_waiting(self) -> None:  # noqa: B027
        """End a wait for other processes, whichever thread waits."""
