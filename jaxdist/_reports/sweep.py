"""Compares plans of one job on one slice."""

import dataclasses
from collections.abc import Iterator, Sequence

from jaxdist._reports.plan import CAVEAT, SlicePlan
from jaxdist._reports.tables import Report, Table
from jaxdist._reports.words import seconds, size

# Columns that a sweep has if some candidate divides a replica in this way.
_PARTS = ("stages", "positions", "experts")


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A placement of a job, with its plan, or the reason why it has none."""

    rules: str
    num_replicas: int
    num_logical: int
    plan: SlicePlan | None
    reason: str = ""
    # What the backward pass recomputes, if the task has a choice.
    remat: str = ""
    # The stages of a pipeline, and the devices that divide positions and experts. All of them are
    # among the logical ones.
    stages: int = 1
    positions: int = 1
    experts: int = 1

    @property
    def seconds(self) -> float | None:
        """The expected time of a step; None if the job does not fit.

        The expected time includes the overlaps of the schedule and the efficiencies of the chip. A
        plan without it has the predicted time.
        """
        if self.plan is None or self.plan.times is None or not self.plan.memory.fits:
            return None
        expected = self.plan.expected
        return self.plan.times.predicted if expected is None else expected.seconds


@dataclasses.dataclass(frozen=True, repr=False)
class Sweep(Report):
    """Placements of a job on a slice, the fastest of those that fit first.

    All have the same global batch, so a shorter step means more work in the same time.

    Args:
        name: The name of the job.
        topology: The slice.
        global_rows: Rows of a batch, for all replicas.
        candidates: All placements that were tried.
        notes: Notes that hold for all of them.
    """

    name: str
    topology: str
    global_rows: int
    candidates: tuple[Candidate, ...]
    notes: tuple[str, ...] = ()

    @property
    def ranked(self) -> tuple[Candidate, ...]:
        """The candidates that fit by expected time, then the others in the order of the trials."""
        # The sort is stable, so candidates without a time keep their order.
        return tuple(sorted(self.candidates, key=lambda c: (c.seconds is None, c.seconds or 0.0)))

    @property
    def best(self) -> SlicePlan | None:
        """The plan with the shortest expected step of those that fit."""
        first = next(iter(self.ranked), None)
        return first.plan if first is not None and first.seconds is not None else None

    def parts(self) -> Iterator[Table | str]:
        """Yield tables and sentences."""
        yield (
            f"Ways to lay {self.name} out on {self.topology}, "
            f"with {self.global_rows:,} rows in a batch"
        )
        parts = [n for n in _PARTS if any(getattr(c, n) > 1 for c in self.candidates)]
        more = [*parts, *(["remat"] if any(c.remat for c in self.candidates) else [])]
        names = ("rules", "replicas x logical", *more)
        yield Table(
            "Ranked by expected time",
            ("", *names, "a step", "at least", "by", "peak", "what"),
            tuple(self._row(number, c, more) for number, c in enumerate(self.ranked, 1)),
            frozenset({"", *parts, "a step", "at least", "peak"}),
        )
        yield from self.notes
        yield CAVEAT

    def _row(self, number: int, c: Candidate, more: Sequence[str]) -> tuple[str, ...]:
        """Return the cells of one candidate, with some that not every sweep has."""
        also = (str(getattr(c, name)) for name in more)
        names = (c.rules, f"{c.num_replicas:,} x {c.num_logical}", *also)
        if c.plan is None:
            return ("-", *names, "", "", "", "", c.reason)
        peak = "?" if c.plan.memory.peak is None else size(c.plan.memory.peak)
        if c.plan.times is None or not c.plan.memory.fits:
            # The TPU compiler refuses such a program; the GPU compiler does not.
            limit = size(c.plan.memory.limit)
            return ("-", *names, "", "", "", peak, f"does not fit into {limit}")
        times = c.plan.times
        step, bound = seconds(c.seconds or 0.0), seconds(times.bound)
        return (str(number), *names, step, bound, times.bound_by, peak, "fits")
