"""Counts the results of a record, and compares them with those of an earlier one."""

import collections
import dataclasses
from collections.abc import Sequence

from tools.mutants.record import RESULTS, Row, pair
from tools.mutants.sample import Mutant

MOST_POINTS = 3.0


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What is different from the record before."""

    # Killed before, and not killed now: the row before, and the row now.
    lost: list[tuple[Row, Row]]
    # Killed before, and not run yet with this code.
    open: list[Row]
    # Not in the package, or in it with a function that allows no change.
    gone: list[Row]
    # Percent of all mutants that were killed before, and of those that ran now.
    before: float
    now: float

    @property
    def is_good(self) -> bool:
        """Return whether the tests find what they found before."""
        return not self.lost and self.now >= self.before - MOST_POINTS

    def write(self) -> str:
        """Write it for a reader."""
        lines = [f"killed before: {self.before:.1f} %, now: {self.now:.1f} %"]
        for before, now in self.lost:
            lines.append(
                f"LOST: {now.file}: {now.function} ({now.mutation}) is {now.result}; "
                f"{before.test} killed it"
                + ("" if before.has_change_of(now) else f" with {before.mutation}")
            )
        for row in self.gone:
            lines.append(f"gone: {row.file}: {row.function}, which was {row.result}")
        if self.open:
            lines.append(f"{len(self.open)} mutants that were killed are not run yet")
        if not self.is_good and not self.lost:
            lines.append(f"FEWER: the total may fall by {MOST_POINTS:g} points")
        return "\n".join(lines)


def compare(mutants: Sequence[Mutant], before: Sequence[Row], now: Sequence[Row]) -> Comparison:
    """Compare two records; `now` has rows of this code only."""
    old, new = pair(mutants, before), pair(mutants, now)
    kept = set(map(id, old.values()))
    killed = {number: row for number, row in old.items() if row.result == "killed"}
    return Comparison(
        lost=[
            (row, new[number])
            for number, row in killed.items()
            if number in new and new[number].result != "killed"
        ],
        open=[row for number, row in killed.items() if number not in new],
        gone=[row for row in before if id(row) not in kept],
        before=count_percent(before),
        now=count_percent(now),
    )


def count_percent(rows: Sequence[Row]) -> float:
    """Return the percentage of killed mutants."""
    killed = sum(row.result == "killed" for row in rows)
    return 100 * killed / len(rows) if rows else 0.0


def make_summary(mutants: Sequence[Mutant], rows: Sequence[Row]) -> str:
    """Write how many mutants have which result, and which survived."""
    counts = collections.Counter(row.result for row in rows)
    numbers = ", ".join(f"{counts[result]} {result}" for result in RESULTS)
    left = len(mutants) - len(rows)
    lines = [
        f"{row.result}: {row.file}: {row.function} ({row.mutation}), tests: {row.tests}"
        for row in rows
        if row.result != "killed"
    ]
    lines.append(
        f"{len(mutants)} mutants: {numbers}, {left} not run yet; "
        f"{count_percent(rows):.1f} % of those that ran are killed"
    )
    return "\n".join(lines)
