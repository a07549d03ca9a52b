"""One line of the report: what was compared, what is needed, and whether it was met."""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any, ClassVar


@dataclasses.dataclass(frozen=True)
class Need:
    """The demand on a comparison of times.

    Args:
        ratio: Largest ratio of the medians per round; None reports only.
        more_us: Most microseconds that a step may take longer, or None.
    """

    ratio: float | None = None
    more_us: float | None = None

    def is_met(self, ratio: float, more_us: float) -> bool | None:
        """Whether these figures meet it; None where nothing is demanded."""
        if self.ratio is None:
            return None
        return ratio <= self.ratio and (self.more_us is None or more_us <= self.more_us)

    def __str__(self) -> str:
        if self.ratio is None:
            return "report"
        more = "" if self.more_us is None else f", +{self.more_us:g} us"
        return f"<= {self.ratio:g}{more}"


@dataclasses.dataclass(frozen=True)
class TimeLine:
    """Times of an arm against a comparator, from one interleaved run."""

    row: str
    size: str
    arm: str
    comparator: str
    arm_us: float  # median wall per step
    comparator_us: float
    ratios: tuple[float, ...]  # wall, per round
    cpu_ratio: float
    need: Need

    gates: ClassVar[bool] = False

    @property
    def ratio(self) -> float:
        """The median of the ratios of each round."""
        return statistics.median(self.ratios)

    @property
    def met(self) -> bool | None:
        """Whether the need is met; None for a report."""
        return self.need.is_met(self.ratio, self.arm_us - self.comparator_us)

    def cells(self) -> Sequence[str]:
        """The cells of the table after row, size, arm and comparator."""
        return (
            f"{_time(self.arm_us)} / {_time(self.comparator_us)}",
            f"{self.ratio:.3f}",
            f"{min(self.ratios):.3f}..{max(self.ratios):.3f}",
            f"{self.cpu_ratio:.3f}",
            str(self.need),
        )

    def as_json(self) -> dict[str, Any]:
        """All figures."""
        return {
            **_common(self),
            "arm_us": self.arm_us,
            "comparator_us": self.comparator_us,
            "ratio": self.ratio,
            "ratios": list(self.ratios),
            "cpu_ratio": self.cpu_ratio,
        }


@dataclasses.dataclass(frozen=True)
class CountLine:
    """Something counted, which load does not change; it always gates."""

    row: str
    size: str
    arm: str
    comparator: str
    found: str
    expected: str

    gates: ClassVar[bool] = True

    @property
    def need(self) -> str:
        """What was expected."""
        return f"= {self.expected}"

    @property
    def met(self) -> bool:
        """Whether exactly that was found."""
        return self.found == self.expected

    def cells(self) -> Sequence[str]:
        """The cells of the table after row, size, arm and comparator."""
        return ("", self.found, "", "", self.need)

    def as_json(self) -> dict[str, Any]:
        """What was found and expected."""
        return {**_common(self), "found": self.found, "expected": self.expected}


@dataclasses.dataclass(frozen=True)
class SkipLine:
    """A comparison that was not made, and why."""

    row: str
    why: str

    gates: ClassVar[bool] = False
    met: ClassVar[bool | None] = None

    def as_json(self) -> dict[str, Any]:
        """The reason."""
        return {"row": self.row, "skipped": self.why}


@dataclasses.dataclass(frozen=True)
class NoteLine:
    """What the figures of a row rest on."""

    row: str
    what: str

    gates: ClassVar[bool] = False
    met: ClassVar[bool | None] = None

    def as_json(self) -> dict[str, Any]:
        """The words."""
        return {"row": self.row, "note": self.what}


Line = TimeLine | CountLine | SkipLine | NoteLine


def _common(line: TimeLine | CountLine) -> dict[str, Any]:
    return {
        "row": line.row,
        "size": line.size,
        "arm": line.arm,
        "comparator": line.comparator,
        "need": str(line.need),
        "met": line.met,
        "gates": line.gates,
    }


def _time(us: float) -> str:
    return f"{us:.1f} us" if us < 1000 else f"{us / 1000:.2f} ms"
