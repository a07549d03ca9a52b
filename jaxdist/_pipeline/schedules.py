"""Schedules of a pipeline: which stage does what at which tick. Tables of data, without JAX.

A schedule is one function here and one line of `SCHEDULES`. Nothing else depends on its name: the
engine runs any table whose inputs are computed before they are used.

Note:
    All stages are in lock-step: a tick takes as long as its slowest stage. So a tick has operations
    of equal length only. Forward and backward have ticks of their own, and what fills the gaps of a
    tick (W) is not longer than what the other stages do there. The published order of zero-bubble
    schedules mixes F, I and W in a tick; in lock-step that costs more than its bubble saves.
"""

import collections
import dataclasses
import fractions
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from jaxdist._called import called, refuse
from jaxdist._validate import as_integer

# F: forward. B: backward. I and W: its two parts, for the input and for the weights of the layers.
KINDS = "FBIW"
# Each takes as long as the others: two products of a layer in the backward, one in the forward.
EQUAL_COSTS: Mapping[str, float] = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}

_MOST = 1 << 16


class Op(NamedTuple):
    """What a stage does in a tick: a kind (F, B, I or W), for a chunk of layers, on a micro-batch.

    Chunk `c` of stage `s` is piece `c * stages + s` of the model.
    """

    kind: str
    chunk: int
    micro_batch: int


class Ends(NamedTuple):
    """The part of some ticks in which a stage has the first, or the last, piece of the model."""

    first: fractions.Fraction
    last: fractions.Fraction


# For each stage, its operation or None.
Tick: TypeAlias = tuple[Op | None, ...]


@dataclasses.dataclass(frozen=True)
class Table:
    """A schedule for a number of stages, micro-batches and chunks.

    Attributes:
        name: The name of the schedule.
        stages: Number of stages.
        micro_batches: Number of micro-batches.
        chunks: Number of pieces of the model on each stage.
        groups: The ticks in order, in groups. Groups of equal kinds share one body of a loop.
    """

    name: str
    stages: int
    micro_batches: int
    chunks: int
    groups: tuple[tuple[Tick, ...], ...]

    @property
    def ticks(self) -> tuple[Tick, ...]:
        """All ticks, in order."""
        return tuple(tick for group in self.groups for tick in group)

    @functools.cached_property
    def counts(self) -> dict[str, int]:
        """How many ticks there are of each set of kinds, such as F, B, or "FW"."""
        found = collections.Counter(map(kinds_of, self.ticks))
        return {
            kinds: found[kinds] for kinds in sorted(found, key=lambda k: (KINDS.index(k[0]), k))
        }

    def count_ends(self, ticks: Sequence[Tick], kind: str) -> Ends:
        """Return the part of these ticks with an operation of a kind on an end of the model."""
        pieces = [
            {op.chunk * self.stages + s for s, op in enumerate(tick) if op and op.kind == kind}
            for tick in ticks
        ]
        first = sum(0 in of_tick for of_tick in pieces)
        last = sum(self.stages * self.chunks - 1 in of_tick for of_tick in pieces)
        return Ends(fractions.Fraction(first, len(ticks)), fractions.Fraction(last, len(ticks)))

    @property
    def has_gradients(self) -> bool:
        """Whether there is a backward."""
        return any(kind in kinds for kinds in self.counts for kind in "BI")

    @property
    def has_two_parts(self) -> bool:
        """Whether the backward is done in two parts, I and W."""
        return any("W" in kinds for kinds in self.counts)

    def bubble(self, costs: Mapping[str, float] = EQUAL_COSTS) -> float:
        """Return the time in which a stage waits, as a share of the time in which it works.

        Args:
            costs: The time of each kind. With `jax.checkpoint` in the layer, a B takes 3 and an I
                takes 2.
        """
        times = [[costs[op.kind] if op else 0.0 for op in tick] for tick in self.ticks]
        worked = sum(map(sum, times)) / self.stages
        return sum(map(max, times)) / worked - 1

    @property
    def forward_only(self) -> "Table":
        """The same without gradients: its forward, in the order of the schedule."""
        groups = [
            tuple(tick for tick in group if any(op and op.kind == "F" for op in tick))
            for group in self.groups
        ]
        only = tuple(
            tuple(tuple(op if op and op.kind == "F" else None for op in tick) for tick in group)
            for group in groups
            if group
        )
        return dataclasses.replace(self, groups=only)

    def __str__(self) -> str:
        """Draw the table: a row for each stage, a column for each tick, in 80 columns."""
        return "\n".join(_draw(self))


def kinds_of(tick: Tick) -> str:
    """Return the kinds of a tick, in the order of `KINDS`."""
    found = {op.kind for op in tick if op}
    return "".join(kind for kind in KINDS if kind in found)


@called("nn.schedules.gpipe")
def gpipe(stages: int, micro_batches: int, chunks: int = 1) -> Table:
    """Return the table of GPipe: all forwards, then all backwards.

    Cost:
        `chunks * micro_batches + stages - 1` ticks of each. Each stage keeps the residuals of all
        micro-batches.

    Args:
        stages: Number of stages.
        micro_batches: Number of micro-batches.
        chunks: Number of pieces of the model on each stage.

    Raises:
        ArgumentTypeError: A number is not an integer.
        ArgumentError: A number is below 1.

    Example:
        >>> print(jaxdist.nn.schedules.gpipe(2, 3))
        gpipe: 2 stages, 3 micro-batches, 1 chunk
        8 ticks: 4 F, 4 B; bubble 0.333
        <BLANKLINE>
        stage 0 F0 F1 F2  .  . B0 B1 B2
        stage 1  . F0 F1 F2 B0 B1 B2  .
    """
    _check(stages, micro_batches, chunks)
    forward = _line(stages, micro_batches, chunks, "F")
    backward = _line(stages, micro_batches, chunks, "B", max(forward) + 1)
    return Table("gpipe", stages, micro_batches, chunks, _join(forward, backward))


@called("nn.schedules.one_f_one_b")
def one_f_one_b(stages: int, micro_batches: int, chunks: int = 1) -> Table:
    """Return the table of 1F1B: a backward follows as soon as its forward is done.

    Cost:
        As many ticks as `gpipe`. A stage keeps the residuals of at most `2 * stages - 1`
        micro-batches, however many there are.

    Args:
        stages: Number of stages.
        micro_batches: Number of micro-batches.
        chunks: Number of pieces of the model on each stage; more than 1 is "interleaved".

    Raises:
        ArgumentTypeError: A number is not an integer.
        ArgumentError: A number is below 1.

    Example:
        >>> print(jaxdist.nn.schedules.one_f_one_b(2, 3))
        1f1b: 2 stages, 3 micro-batches, 1 chunk
        8 ticks: 4 F, 4 B; bubble 0.333
        <BLANKLINE>
        stage 0 F0 F1  . F2 B0  . B1 B2
        stage 1  . F0 B0 F1 B1 F2 B2  .
    """
    _check(stages, micro_batches, chunks)
    forward = _line(stages, micro_batches, chunks, "F")
    backward = _line(stages, micro_batches, chunks, "B", _first_backward(forward, stages, chunks))
    return Table("1f1b", stages, micro_batches, chunks, _join(forward, backward))


@called("nn.schedules.zero_bubble")
def zero_bubble(stages: int, micro_batches: int, chunks: int = 1) -> Table:
    """Return the table of 1F1B with the backward in two parts; W is done where a stage would idle.

    Cost:
        The bubble is a third of that of `one_f_one_b`. A stage keeps the residuals of at most
        `3 * stages - 2` micro-batches, and what W needs of at most `2 * stages - 1` others.

    Args:
        stages: Number of stages.
        micro_batches: Number of micro-batches.
        chunks: Number of pieces of the model on each stage.

    Raises:
        ArgumentTypeError: A number is not an integer.
        ArgumentError: A number is below 1.

    Example:
        >>> print(jaxdist.nn.schedules.zero_bubble(2, 3))
        zero_bubble: 2 stages, 3 micro-batches, 1 chunk
        10 ticks: 3 F, 1 FW, 3 I, 1 IW, 2 W; bubble 0.111
        <BLANKLINE>
        stage 0 F0 F1  . F2 I0 W0 I1 W1 I2 W2
        stage 1  . F0 I0 F1 I1 F2 I2 W0 W1 W2
    """
    _check(stages, micro_batches, chunks)
    forward = _line(stages, micro_batches, chunks, "F")
    inputs = _line(stages, micro_batches, chunks, "I", _first_backward(forward, stages, chunks))
    groups = _fill(forward, inputs, stages, micro_batches * chunks)
    return Table("zero_bubble", stages, micro_batches, chunks, groups)


SCHEDULES: Mapping[str, Callable[[int, int, int], Table]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "zero_bubble": zero_bubble,
}


def _check(stages: int, micro_batches: int, chunks: int) -> None:
    as_integer("stages", stages, least=1)
    as_integer("micro_batches", micro_batches, least=1)
    as_integer("chunks", chunks, least=1)
    # The table has this many operations of each kind; a program with more does not compile.
    total = stages * micro_batches * chunks
    if total > _MOST:
        raise refuse(
            f"stages={stages}, micro_batches={micro_batches} and chunks={chunks}: {total} "
            "operations of each kind.",
            f"A table has at most {_MOST} of them.",
            f"Pass fewer micro-batches: at most {max(1, _MOST // (stages * chunks))} for these "
            "stages and chunks.",
        )


# Times of one direction: for each time, the operation of each stage that has one.
_Line: TypeAlias = dict[int, dict[int, Op]]


def _line(stages: int, micro_batches: int, chunks: int, kind: str, start: int = 0) -> _Line:
    """Return one direction: each stage idles for `stages - 1` times only, before or after its work.

    Micro-batches pass through the stages in rounds. A round enters the next chunk as soon as its
    last micro-batch has left the first stage, so a round of at least `stages` micro-batches leaves
    no gap. Rounds have equal sizes, or one more, so any number from `stages` up has no gap.
    """
    rounds = max(micro_batches // stages, 1)
    sizes = [micro_batches // rounds + (r < micro_batches % rounds) for r in range(rounds)]
    found: _Line = collections.defaultdict(dict)
    micro_batch = 0
    for size in sizes:
        period = max(size, stages)
        for place in range(size):
            for piece in range(chunks * stages):
                chunk, stage = divmod(piece, stages)
                time = start + chunks * (micro_batch - place) + place + period * chunk + stage
                if kind == "F":
                    found[time][stage] = Op(kind, chunk, micro_batch)
                else:
                    found[time][stages - 1 - stage] = Op(kind, chunks - 1 - chunk, micro_batch)
            micro_batch += 1
    return dict(sorted(found.items()))


def _first_backward(forward: _Line, stages: int, chunks: int) -> int:
    """Return the first time at which the backward can start and never wait for the forward.

    The forward of a time is done before its backward.
    """
    done = {
        row[stages - 1].micro_batch: time
        for time, row in forward.items()
        if stages - 1 in row and row[stages - 1].chunk == chunks - 1
    }
    enters = {
        row[0].micro_batch: time for time, row in forward.items() if 0 in row and row[0].chunk == 0
    }
    # The backward enters micro-batches at the last stage in the steps of the forward at the first.
    return max(done[m] - enters[m] for m in done)


def _join(*lines: _Line) -> tuple[tuple[Tick, ...], ...]:
    """Return a group for each time, with a tick for each line that does something then."""
    stages = 1 + max(stage for line in lines for row in line.values() for stage in row)
    times = sorted(set[int]().union(*lines))
    return tuple(
        tuple(_as_tick(line[time], stages) for line in lines if time in line) for time in times
    )


def _as_tick(row: Mapping[int, Op], stages: int) -> Tick:
    return tuple(row.get(stage) for stage in range(stages))


def _fill(forward: _Line, inputs: _Line, stages: int, each: int) -> tuple[tuple[Tick, ...], ...]:
    """Return groups in which stages that idle in a tick of F or I do a W, with W ticks between.

    Args:
        forward: The ticks of F.
        inputs: The ticks of I.
        stages: Number of stages.
        each: How many W each stage does.
    """
    waiting: list[collections.deque[Op]] = [collections.deque() for _ in range(stages)]
    left = stages * each
    groups: list[tuple[Tick, ...]] = []
    # In the last `stages - 1` ticks of I, stages idle one after the other. Each needs a W to do
    # there. So W ticks start late, by as many times as there will be such gaps.
    start, end = min(inputs) + 2 * (stages - 1), max(inputs)
    time = 0
    while left:
        ticks: list[Tick] = []
        for line in (forward, inputs):
            if time not in line:
                continue
            row = dict(line[time])
            for stage in range(stages):
                if stage not in row and waiting[stage]:
                    row[stage] = waiting[stage].popleft()
                    left -= 1
            for stage, op in line[time].items():
                if op.kind == "I":
                    waiting[stage].append(op._replace(kind="W"))
            ticks.append(_as_tick(row, stages))
        if left and time >= start and (all(waiting) or (time >= end and any(waiting))):
            ticks.append(tuple(ops.popleft() if ops else None for ops in waiting))
            left -= sum(op is not None for op in ticks[-1])
        if ticks:
            groups.append(tuple(ticks))
        time += 1
    return tuple(groups)


def _draw(table: Table) -> Iterator[str]:
    def count(number: int, what: str) -> str:
        return (
            f"{number} {what}"
            + "es" * (number > 1 and what[-1] == "h")
            + "s" * (number > 1 and what[-1] != "h")
        )

    sizes = (table.stages, "stage"), (table.micro_batches, "micro-batch"), (table.chunks, "chunk")
    kinds = ", ".join(f"{number} {kinds}" for kinds, number in table.counts.items())
    yield f"{table.name}: {', '.join(count(*size) for size in sizes)}"
    yield f"{count(len(table.ticks), 'tick')}: {kinds}; bubble {table.bubble():.3f}"
    cells = [[_show(tick[stage], table) for tick in table.ticks] for stage in range(table.stages)]
    widths = [max(map(len, column)) + 1 for column in zip(*cells, strict=True)]
    label = len(f"stage {table.stages - 1}")
    for first, last in _lines(widths, 80 - label):
        yield ""
        for stage, row in enumerate(cells):
            drawn = "".join(
                cell.rjust(widths[n]) for n, cell in enumerate(row) if first <= n < last
            )
            yield f"stage {stage}".ljust(label) + drawn


def _show(op: Op | None, table: Table) -> str:
    """Return the kind and the micro-batch; with several chunks, a letter for the chunk."""
    if op is None:
        return "."
    if table.chunks == 1:
        return f"{op.kind}{op.micro_batch}"
    letter = "abcdefghijklmnopqrstuvwxyz"[op.chunk] if table.chunks <= 26 else f".{op.chunk}"
    return f"{op.kind}{op.micro_batch}{letter}"


def _lines(widths: Sequence[int], space: int) -> Iterator[tuple[int, int]]:
    """Return the first and last columns of each line of `space` characters."""
    first = used = 0
    for n, width in enumerate(widths):
        if used + width > space and n > first:
            yield first, n
            first, used = n, 0
        used += width
    yield first, len(widths)
