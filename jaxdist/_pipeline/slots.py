"""Slots for what waits between the ticks of a table, and the table as arrays of integers."""

import collections
import dataclasses
import heapq
from collections.abc import Sequence

import numpy as np

from jaxdist._pipeline.schedules import KINDS, Table, Tick

# What waits: inputs that arrived (x), cotangents that arrived (g), residuals of the forward (r),
# and what the first part of the backward saves for the second (d).
WAITING = "xgrd"
_Work = tuple[int, int, int]  # stage, chunk, micro-batch


@dataclasses.dataclass(frozen=True)
class Slots:
    """Where each value waits on each stage, and how many slots a stage has for each kind.

    Attributes:
        table: The schedule.
        sizes: The number of slots, by kind: the largest of all stages, since one program runs on
            all of them.
        at: The slot of a value: its kind, and the stage, chunk and micro-batch of its operation.
    """

    table: Table
    sizes: dict[str, int]
    at: dict[tuple[str, _Work], int]

    def arrays(self, ticks: Sequence[Tick]) -> dict[str, np.ndarray]:
        """Return what the engine reads: for each name, integers `[ticks, stages]`.

        `kind` is 0 for nothing, else 1 + the index in `KINDS`. `x`, `g`, `r` and `d` are slots of
        the operation itself; `put_x` and `put_g` say where a stage puts what arrives after the
        tick. A value that nobody needs goes to one more slot, after the last one. `has_last` says
        on all stages whether the last piece of the model has an output after this tick, and
        `has_first` whether the first piece runs in it, forward or backward; `head_micro_batch` and
        `head_g` are the micro-batch of the last piece and the slot of its cotangent.
        """
        table, pieces = self.table, self.table.stages * self.table.chunks
        shape = len(ticks), table.stages
        names = (
            "kind",
            "chunk",
            "micro_batch",
            "is_first",
            "is_last",
            *WAITING,
            "has_first",
            "has_last",
            "head_micro_batch",
        )
        found = {name: np.zeros(shape, np.int32) for name in names}
        for name in ("put_x", "put_g", "head_g"):
            found[name] = np.full(shape, self.sizes[name[-1]], np.int32)
        for n, tick in enumerate(ticks):
            for stage, op in enumerate(tick):
                if op is None:
                    continue
                piece = op.chunk * table.stages + stage
                found["kind"][n, stage] = 1 + KINDS.index(op.kind)
                found["chunk"][n, stage] = op.chunk
                found["micro_batch"][n, stage] = op.micro_batch
                found["is_first"][n, stage] = piece == 0
                found["is_last"][n, stage] = piece == pieces - 1
                for kind in WAITING:
                    work = (stage, op.chunk, op.micro_batch)
                    found[kind][n, stage] = self.at.get((kind, work), 0)
                if op.kind == "F" and piece == pieces - 1:
                    found["has_last"][n] = 1
                    found["head_micro_batch"][n] = op.micro_batch
                    found["head_g"][n, stage] = found["g"][n, stage]
                step = {"F": 1, "B": -1, "I": -1}.get(op.kind, 0)
                if step and piece == 0:
                    found["has_first"][n] = 1
                if step and 0 <= piece + step < pieces:
                    chunk, there = divmod(piece + step, table.stages)
                    kind = "x" if step > 0 else "g"
                    slot = self.at.get((kind, (there, chunk, op.micro_batch)), self.sizes[kind])
                    found[f"put_{kind}"][n, there] = slot
        return found


def find_slots(table: Table) -> Slots:
    """Give each value a slot for the ticks in which it waits.

    A value is written at the end of a tick, and read at the start of one. So a slot is free again
    from the tick on in which its value is read last.
    """
    spans = _find_spans(table)
    sizes: dict[str, int] = dict.fromkeys(list(WAITING), 0)
    at: dict[tuple[str, _Work], int] = {}
    for (kind, stage), waits in spans.items():
        free: list[int] = []
        busy: list[tuple[int, int]] = []
        count = 0
        for start, end, work in sorted(waits):
            while busy and busy[0][0] <= start:
                heapq.heappush(free, heapq.heappop(busy)[1])
            if free:
                slot = heapq.heappop(free)
            else:
                slot, count = count, count + 1
            heapq.heappush(busy, (end, slot))
            at[kind, (stage, *work)] = slot
        sizes[kind] = max(sizes[kind], count)
    return Slots(table, sizes, at)


def _find_spans(table: Table) -> dict[tuple[str, int], list[tuple[int, int, tuple[int, int]]]]:
    """Return for each kind and stage the ticks at which its values are written and read last."""
    when: dict[tuple[str, _Work], int] = {
        (op.kind, (stage, op.chunk, op.micro_batch)): n
        for n, tick in enumerate(table.ticks)
        for stage, op in enumerate(tick)
        if op is not None
    }
    back = "I" if table.has_two_parts else "B"
    pieces = table.stages * table.chunks
    spans = collections.defaultdict(list)
    for (kind, work), forward in when.items():
        if kind != "F":
            continue
        stage, chunk, micro_batch = work
        piece = chunk * table.stages + stage

        def beside(piece: int, kind: str, micro_batch: int = micro_batch) -> int:
            chunk, stage = divmod(piece, table.stages)
            return when[kind, (stage, chunk, micro_batch)]

        if piece > 0:
            spans["x", stage].append((beside(piece - 1, "F"), forward, work[1:]))
        if (back, work) not in when:  # a table without gradients
            continue
        backward = when[back, work]
        end = when.get(("W", work), backward)
        # The last stage computes the cotangent of its output itself, right after its forward.
        came = beside(piece + 1, back) if piece < pieces - 1 else forward
        spans["g", stage].append((came, backward, work[1:]))
        spans["r", stage].append((forward, end, work[1:]))
        if table.has_two_parts:
            spans["d", stage].append((backward, end, work[1:]))
    return spans
