"""Assembles the data that each process has read: by policy, or from its own dataset."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxdist._called import called
from jaxdist._values import Ahead
from jaxdist.data._assembler import cannot_split_error, read_slots
from jaxdist.data._reading.ahead import RowsAhead, find_uneven_splits
from jaxdist.data._reading.elements import Element
from jaxdist.data._reading.files import FilesIterator
from jaxdist.data._reading.partial_batch import GROUP_CALLER, SPLIT_CALLER, PartialBatch, split_rows
from jaxdist.data._sharing.assembler import ShareAssembler, Slot, agreed_padding
from jaxdist.data._sharing.exchange import Offer
from jaxdist.data._sharing.share import PieceReader, Share, cut_evenly, fill


@dataclasses.dataclass(eq=False)
class SplitAssembler(ShareAssembler):
    """An assembler of batches whose rows are split over the replicas."""

    caller = SPLIT_CALLER

    @property
    def padded_rows_of_replica(self) -> int:
        """Rows to which the value of each replica is padded."""
        return self.fixed.rows // self.num_replicas

    def _read_element(self, raw: Share, index: int) -> Element:
        element = self.read(raw.raw, index)
        if self.num_replicas > 1 and not all(leaf.ndim for leaf in element.leaves):
            raise cannot_split_error(element, index, self.num_replicas, self.policy)
        return element


@dataclasses.dataclass(eq=False)
class GlobalAssembler(SplitAssembler):
    """An assembler for the policy DATA: each replica takes its rows of a global batch.

    Args:
        is_alike: Whether the dataset determines the rows of all batches, so that the processes
            compare only their first batches.
    """

    is_alike: bool
    _total: int = dataclasses.field(default=0, init=False)

    def _find_uneven(self, ahead: Sequence[RowsAhead], done: int) -> Ahead:
        return find_uneven_splits(ahead, self.placer.divide, done)

    def _read_slots(self, raw: Share, index: int) -> list[Slot]:
        element = self._read_element(raw, index)
        local = self.layout.local_replicas
        if raw.total is None:
            self._total = element.rows or 0
            if self.policy is PartialBatch.PAD:
                self.fixed.fit([element], index)
            slices = self.cut(self._total)
            return [_cut_element(element, slices[r]) for r in local]
        self._total = raw.total
        whole = self.cut(raw.total)
        own = fill(element.rows or 0, [whole[r].stop - whole[r].start for r in local])
        return [_cut_element(element, rows) for rows in own]

    def cut(self, total: int) -> list[slice]:
        """Return the rows of a global batch that each replica takes."""
        padded, balanced = self._rows_to_pad_to(), self.placer.balanced
        return cut_evenly(total, self.num_replicas, padded, balanced=balanced)

    def _known_rows(self, raw: Any) -> Sequence[int | None] | None:
        if not self.is_alike and self.exchange is not None:
            return None
        if not isinstance(raw, Share):
            return [None] * self.num_replicas
        return [s.stop - s.start for s in self.cut(self._total)]

    @called(lambda self: self.caller)
    def _agree_on_padding(self, offers: Sequence[Offer]) -> None:
        # The rows are already split, so all processes must have split them in the same way.
        agreed = agreed_padding(offers, self._rows_to_pad_to())
        self.fixed.rows = agreed * self.num_replicas or self.fixed.rows

    def _is_last(self, rows: Sequence[int | None]) -> bool:
        return False


@dataclasses.dataclass(eq=False)
class LocalAssembler(SplitAssembler):
    """An assembler for FILE and OFF: the replicas of a process take the rows that it has read.

    Args:
        source: With OFF the reader of the pieces of a pass; with FILE the iterator over files.
        batch_size: With FILE, the rows of a global batch.
    """

    source: PieceReader | FilesIterator
    batch_size: int

    def _sizes(self) -> list[int]:
        """Return the largest number of rows that each local replica takes."""
        local = self.layout.local_replicas
        if isinstance(self.source, PieceReader):
            return [-(-self.source.piece // len(local))] * len(local)
        slices = self.placer.divide(self.batch_size)
        return [slices[r].stop - slices[r].start for r in local]

    def _read_slots(self, raw: Share, index: int) -> list[Slot]:
        element = self._read_element(raw, index)
        rows = raw.rows or slice(0, element.rows or 0)
        own = [slice(rows.start + s.start, rows.start + s.stop) for s in self._fill(rows)]
        return [_cut_element(element, part) for part in own]

    def _fill(self, rows: slice) -> list[slice]:
        total, sizes = rows.stop - rows.start, self._sizes()
        if self.placer.balanced:
            return split_rows(total, len(sizes), balanced=True)
        return fill(total, sizes)

    def _rows_to_pad_to(self) -> int:
        if self.policy is not PartialBatch.PAD:
            return 0
        return self.padded_rows_of_replica or max(self._sizes())

    def _agree_on_padding(self, offers: Sequence[Offer]) -> None:
        super()._agree_on_padding(offers)
        self.fixed.rows *= self.num_replicas

    def _take_progress(self) -> dict[str, int]:
        return {} if isinstance(self.source, PieceReader) else self.source.take_progress()

    def _add_progress(self, offers: Sequence[Offer]) -> None:
        if isinstance(self.source, FilesIterator):
            for offer in offers:
                self.source.add_progress(offer.progress)


def _cut_element(element: Element, rows: slice) -> Element:
    leaves = [leaf[rows] for leaf in element.leaves]
    return Element(leaves, element.treedef, rows.stop - rows.start)


@dataclasses.dataclass(eq=False)
class GroupAssembler(ShareAssembler):
    """An assembler of elements that are each the batch of one local replica.

    Args:
        is_per_replica: Whether each replica reads its own dataset.
    """

    caller = GROUP_CALLER

    is_per_replica: bool
    _own_most: int = dataclasses.field(default=0, init=False)

    @property
    def _is_exclusive(self) -> bool:
        return True  # the reader has copied them

    def _read_slots(self, raw: Share, index: int) -> list[Slot]:
        count = len(self.layout.local_replicas)
        slots = read_slots(self.read, raw.raw, index, count, is_per_replica=self.is_per_replica)
        self._own_most = max((s.rows or 0 for s in slots if s is not None), default=0)
        return slots

    def _rows_to_pad_to(self) -> int:
        return (self.fixed.rows or self._own_most) if self.policy is PartialBatch.PAD else 0
