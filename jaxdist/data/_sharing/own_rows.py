"""Passes over random-access datasets that read only the rows of one process."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from jaxdist.data._reading.ahead import HasRowsAhead, RowsAhead
from jaxdist.data._reading.batches import BatchesIterator
from jaxdist.data._sharing.share import Share

# Maps the number of rows of a global batch to the slices that the local replicas take.
Cut = Callable[[int], Sequence[slice]]


class OwnBatches(Iterator[Share], HasRowsAhead):
    """A pass over `jaxdist.data.batches` that copies only the rows of one process."""

    def __init__(self, iterator: BatchesIterator, cut: Cut) -> None:
        self._iterator = iterator
        self._cut = cut

    def __next__(self) -> Share:
        total, take = self._iterator.advance()
        return Share(take(self._cut(total)), total)

    def rows_ahead(self) -> RowsAhead:
        """Return the row counts of the next global batches."""
        return self._iterator.rows_ahead()

    def get_state(self) -> Any:
        """Return the position, which is the same in all processes."""
        return self._iterator.get_state()

    def set_state(self, state: Any) -> None:
        """Continue from a position."""
        self._iterator.set_state(state)


@dataclasses.dataclass(frozen=True)
class GrainBatches:
    """The global batches of a Grain map dataset.

    Attributes:
        examples: The Grain dataset of single examples.
        batch_size: Rows of a global batch.
        count: Number of batches.
        stack: A function that makes a batch from a list of examples.
    """

    examples: Any
    batch_size: int
    count: int
    stack: Callable[[Sequence[Any]], Any]

    def own(self, cut: Cut) -> "OwnGrainRows":
        """Return the batches with only the rows of one process."""
        return OwnGrainRows(self, cut)


@dataclasses.dataclass(frozen=True)
class OwnGrainRows:
    """A source for `grain.MapDataset.source`: the shares of one process."""

    batches: GrainBatches
    cut: Cut

    def __len__(self) -> int:
        return self.batches.count

    def __getitem__(self, index: Any) -> Share:
        whole = self.batches
        start = int(index) * whole.batch_size
        total = min(whole.batch_size, len(whole.examples) - start)
        rows = [start + i for s in self.cut(total) for i in range(s.start, s.stop)]
        if rows:
            return Share(whole.stack([whole.examples[i] for i in rows]), total)
        # Without own rows, one example shows the structure of a batch.
        one = whole.stack([whole.examples[start]])
        return Share(jax.tree.map(lambda x: x[:0], one), total)


def find_grain_batches(dataset: Any) -> GrainBatches | None:
    """Return the parts of a Grain map dataset that ends with `batch`; None for other datasets."""
    # Grain has no public names for the parts of a dataset. If a later version renames them, every
    # process reads whole batches, which is slower and gives the same rows.
    is_grain = type(dataset).__module__.split(".")[0] == "grain"
    stack = getattr(dataset, "_batch_fn", None)
    examples = getattr(dataset, "_parent", None)
    size = getattr(dataset, "_batch_size", None)
    if not is_grain or type(dataset).__name__ != "BatchMapDataset" or not isinstance(size, int):
        return None
    # Any other function may need all rows of the batch, for instance to pad to the longest one.
    if getattr(stack, "__name__", "") != "make_batch" or stack is None or examples is None:
        return None
    if stack.__module__.split(".")[0] != "grain":
        return None
    return GrainBatches(examples, size, len(dataset), stack)
