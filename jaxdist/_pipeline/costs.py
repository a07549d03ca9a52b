"""What a pipeline keeps on a stage while it runs: slots, and their bytes."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxdist._pipeline.slots import WAITING, Slots

_NAMES = {"x": "inputs", "g": "cotangents", "r": "residuals", "d": "deferred"}


class Kept(NamedTuple):
    """Slots of one kind on a stage.

    Attributes:
        slots: How many values wait at the same time, at most.
        nbytes: The bytes of all slots. An array counts whole where an axis beside that of the
            stages splits it.
    """

    slots: int
    nbytes: int


def count_kept(slots: Slots, state: Mapping[str, Sequence[Any]]) -> dict[str, Kept]:
    """Return what a stage keeps, by kind: inputs, cotangents, residuals, and deferred for W.

    Args:
        slots: The slots of the schedule.
        state: Their arrays, by kind.
    """
    return {
        _NAMES[kind]: Kept(
            slots.sizes[kind], sum(a.size * a.dtype.itemsize for a in state.get(kind, ()))
        )
        for kind in WAITING
    }
