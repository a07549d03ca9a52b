"""`Share`, the data that a process has read for one step, and its readers and iterators."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxdist.data._reading.batches import Batches, BatchesIterator
from jaxdist.data._reading.elements import as_array
from jaxdist.data._reading.partial_batch import split_rows
from jaxdist.data._reading.readers import ENDED, OuterReader, Reader


@dataclasses.dataclass(frozen=True)
class Share:
    """The data that a process has read for one step.

    Attributes:
        raw: An element of the user's dataset.
        total: Number of rows of the global batch, if `raw` has only the rows of this process; None
            if `raw` is a whole element.
        rows: The rows of `raw` that this step takes; None means all.
    """

    raw: Any
    total: int | None = None
    rows: slice | None = None


class ShareReader(OuterReader):
    """A reader whose elements are shares; at the end it returns `ENDED` and does not raise."""

    _has_ended = False

    def read(self) -> Any:
        """Return the next share, or `ENDED`."""
        if self._has_ended:
            return ENDED
        try:
            raw = self.inner.read()
        except StopIteration:
            self._has_ended = True
            return ENDED
        return raw if isinstance(raw, Share) else Share(raw)

    def seek(self, position: Any) -> None:
        """Continue from `position`."""
        super().seek(position)
        self._has_ended = False


class PieceReader(OuterReader):
    """A reader of pieces of elements: with the policy OFF, a step takes a part of an element.

    Args:
        reader: A pass over all elements.
        count: Number of processes; an element lasts for this many steps.
        batch_size: Rows of the largest element; with 0, the first element decides.
    """

    def __init__(self, reader: Reader, count: int, batch_size: int) -> None:
        super().__init__(reader)
        self._count = count
        self.piece = -(-batch_size // count)
        self._element: Any = None
        self._total = 0
        self._done = 0
        self._before: Any = None

    def read(self) -> Share:
        """Return the next piece, or raise `StopIteration`."""
        if self._done >= self._total:
            self._open_next()
        start = self._done
        # An element without rows is one piece, for which `ElementReader` raises an error.
        self._done = min(start + self.piece, self._total) if self._total else 0
        return Share(self._element, rows=slice(start, self._done))

    def _open_next(self) -> None:
        self._before = self.inner.position()
        element = self.inner.read()
        leaves = [as_array(x) for x in jax.tree.leaves(element)]
        self._element, self._done = element, 0
        self._total = next((x.shape[0] for x in leaves if x.ndim), 0)
        self.piece = self.piece or max(-(-self._total // self._count), 1)

    def rows_ahead(self) -> None:
        """Return None, since other processes may read faster."""

    def position(self) -> Any:
        """Return the position before the element, the rows taken of it, and the piece's rows."""
        is_within = self._done < self._total
        before = self._before if is_within else self.inner.position()
        if before is None:
            return None
        return {"element": before, "rows": self._done if is_within else 0, "piece": self.piece}

    def seek(self, position: Any) -> None:
        """Continue from `position`, which may be that of a pass with another policy."""
        is_own = isinstance(position, dict) and set(position) == {"element", "rows", "piece"}
        super().seek(position["element"] if is_own else position)
        self._done = self._total = 0
        if is_own:
            self.piece = int(position["piece"])
            if position["rows"]:
                self._open_next()
                self._done = int(position["rows"])

    def close(self) -> None:
        """Close the pass."""
        self._element = None
        super().close()


def cut_evenly(
    total: int, num_replicas: int, padded_rows: int, *, balanced: bool = False
) -> list[slice]:
    """Return the rows of a global batch that each replica takes.

    Args:
        total: Rows of the global batch.
        num_replicas: Number of replicas.
        padded_rows: Rows to which the value of each replica is padded; 0 without padding.
        balanced: Whether two replicas differ by one row at most.

    Example:
        >>> from jaxdist.data._sharing.share import cut_evenly
        >>> [[s.stop - s.start for s in cut_evenly(6, 4, b)] for b in (0, 3)]
        [[2, 2, 2, 0], [3, 3, 0, 0]]
    """
    if balanced or not padded_rows:
        return split_rows(total, num_replicas, balanced=balanced)
    ends = [min(i * padded_rows, total) for i in range(num_replicas + 1)]
    return [slice(ends[i], ends[i + 1]) for i in range(num_replicas)]


def fill(total: int, most: Sequence[int]) -> list[slice]:
    """Return the rows of each replica; the first replicas take as many as `most` allows.

    Example:
        >>> from jaxdist.data._sharing.share import fill
        >>> [s.stop - s.start for s in fill(4, [3, 3])]
        [3, 1]
    """
    slices: list[slice] = []
    start = 0
    for size in most:
        stop = min(start + size, total)
        slices.append(slice(start, stop))
        start = stop
    return slices


# Maps the number of rows of a global batch to the slices that the local replicas take.
Cut = Callable[[int], Sequence[slice]]


class OwnBatches(BatchesIterator):
    """A pass over `jaxdist.data.batches` that copies only the rows of one process."""

    def __init__(self, source: Batches, cut: Cut) -> None:
        super().__init__(source)
        self._cut = cut

    def __next__(self) -> Share:
        total, take = self.advance()
        return Share(take(self._cut(total)), total)


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
