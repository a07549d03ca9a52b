"""Assembles batches of elements that each process reads from its own dataset."""

import dataclasses
from collections.abc import Sequence

from jaxdist.data._reading.partial_batch import PartialBatch
from jaxdist.data._reading.readers import ENDED
from jaxdist.data._sharing.assembler import ShareAssembler, Slot
from jaxdist.data._sharing.exchange import Offer
from jaxdist.data._sharing.share import Share


@dataclasses.dataclass(eq=False)
class GroupAssembler(ShareAssembler):
    """An assembler of elements that are each the batch of one local replica.

    Args:
        is_per_replica: Whether each replica reads its own dataset.
    """

    is_per_replica: bool
    _own_most: int = dataclasses.field(default=0, init=False)

    @property
    def _is_exclusive(self) -> bool:
        return True  # the reader has copied them

    def _read_slots(self, raw: Share, index: int) -> list[Slot]:
        count = len(self.layout.local_replicas)
        # Errors give the index of an element in the user's dataset.
        first, stride = (index, 0) if self.is_per_replica else (index * count, 1)
        slots: list[Slot] = [
            None if x is ENDED else self.read(x, first + i * stride) for i, x in enumerate(raw.raw)
        ]
        self._own_most = max((s.rows or 0 for s in slots if s is not None), default=0)
        return slots + [None] * (count - len(slots))

    def _rows_to_pad_to(self) -> int:
        return (self.fixed.rows or self._own_most) if self.policy is PartialBatch.PAD else 0

    def _agree_on_padding(self, offers: Sequence[Offer]) -> None:
        self.fixed.rows = max(o.padded_rows for o in offers)
