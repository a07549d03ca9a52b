"""The driver: bursts of each arm in turn, each in processes of its own; ratios per round."""

import contextlib
import dataclasses
import random
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any

from benchmarks._group import ArmGroup
from benchmarks._lines import CountLine, Need, SkipLine, TimeLine
from benchmarks._process import ArmError, ArmProcess, OneLoop


@dataclasses.dataclass(frozen=True)
class Options:
    """How long and how large.

    Args:
        is_full: More steps per burst and more sizes.
        is_smoke: One round of a few steps at one size, to see that everything runs.
        tensorflow: Interpreter of an environment that has TensorFlow, or None.
        report: Called with one line on what is being measured.
    """

    is_full: bool = False
    is_smoke: bool = False
    tensorflow: str | None = None
    report: Callable[[str], object] = lambda _: None

    @property
    def rounds(self) -> int:
        """Timed rounds, after one warm round."""
        return 1 if self.is_smoke else 15 if self.is_full else 9

    def steps(self, quick: int) -> int:
        """Steps of a burst that has `quick` of them in a quick run."""
        return max(2, quick // 100) if self.is_smoke else quick * 4 if self.is_full else quick

    def sizes(self, *quick: int, full: tuple[int, ...] | None = None) -> tuple[int, ...]:
        """Numbers of replicas to measure; `full` adds some, and a smoke run takes two."""
        if self.is_smoke:
            return (2,)
        return full if self.is_full and full is not None else quick


@dataclasses.dataclass(frozen=True)
class Arm:
    """A function that makes a `Loop`, by name, and the process that it shall run in.

    With several `processes` each makes one, and they run at the same time.
    """

    make: Callable[..., Any]
    params: Mapping[str, Any]
    is_tensorflow: bool = False
    processes: int = 1


def arm(make: Callable[..., Any], *, processes: int = 1, **params: Any) -> Arm:
    """An arm in an environment like the driver's own."""
    return Arm(make, params, processes=processes)


def tensorflow_arm(make: Callable[..., Any], *, processes: int = 1, **params: Any) -> Arm:
    """An arm in the environment that has TensorFlow."""
    return Arm(make, params, is_tensorflow=True, processes=processes)


@dataclasses.dataclass(frozen=True)
class Race:
    """Seconds per step of every arm in every round."""

    row: str
    size: str
    wall: Mapping[str, tuple[float, ...]]
    cpu: Mapping[str, tuple[float, ...]]
    facts: Mapping[str, Mapping[str, Any]]

    def line(self, arm: str, comparator: str, need: Need) -> TimeLine:
        """Compare two arms."""
        return TimeLine(
            self.row,
            self.size,
            arm,
            comparator,
            statistics.median(self.wall[arm]) * 1e6,
            statistics.median(self.wall[comparator]) * 1e6,
            _ratios(self.wall[arm], self.wall[comparator]),
            statistics.median(_ratios(self.cpu[arm], self.cpu[comparator])),
            need,
        )

    def same(self, fact: str, arm: str, comparator: str) -> CountLine:
        """Whether two arms did the same work: they tell exactly the same of it."""
        ours, theirs = (f"{fact} {self.facts[a][fact]}" for a in (arm, comparator))
        return CountLine(self.row, self.size, arm, comparator, ours, theirs)


def _ratios(over: tuple[float, ...], under: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(a / max(b, 1e-12) for a, b in zip(over, under, strict=True))


class Bench:
    """Runs arms for one row after the other; leaving the `with` block ends all processes.

    Each row has fresh processes, one for each arm; in a smoke run rows share them.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self._row = ""
        self._processes: dict[tuple[str, int | None], ArmProcess] = {}
        self._groups: dict[tuple[str, int | None, int], ArmGroup] = {}
        self.kept: dict[str, Any] = {}  # what one row has found out, for others
        self.folder = tempfile.mkdtemp(prefix="jaxdist-bench-")

    @contextlib.contextmanager
    def row(self, name: str) -> Iterator["Bench"]:
        """Measure for this row; its processes end with the block."""
        self._row = name
        try:
            yield self
        finally:
            if not self.options.is_smoke:
                self.close()

    def process(self, label: str, *, devices: int | None = 8) -> ArmProcess:
        """The process of this arm; `devices=None` is the TensorFlow environment."""
        key = (label, devices)
        if key not in self._processes:
            self._processes[key] = ArmProcess(self._python(devices), devices=devices)
        return self._processes[key]

    def group(self, label: str, count: int, *, devices: int | None = 1) -> ArmGroup:
        """`count` processes of this arm that work together."""
        key = (label, devices, count)
        if key not in self._groups:
            self._groups[key] = ArmGroup(self._python(devices), devices=devices, count=count)
        return self._groups[key]

    def _python(self, devices: int | None) -> str:
        python = sys.executable if devices is not None else self.options.tensorflow
        if python is None:
            raise ArmError("no environment with TensorFlow was named")
        return python

    def race(
        self,
        size: str,
        arms: Mapping[str, Arm],
        steps: int | Mapping[str, int],
        *,
        devices: int = 8,
        in_one_process: bool = False,
        times_rounds: int = 1,
    ) -> Race:
        """Interleave the arms: a warm round, then bursts of each in an order that is drawn.

        What allocates much memory at every step is as fast as the pages that its process happens
        to have: copies of one program in two processes differ by a third. Such arms run in one.
        Bursts still find the pages that others have left, up to two thirds apart: short bursts in
        `times_rounds` as many rounds bring copies within a few percent of each other.
        """
        self.options.report(f"row {self._row}: {size}: {', '.join(arms)}")
        count = {a: steps if isinstance(steps, int) else steps[a] for a in arms}
        # All start before the first is waited for.
        running: dict[str, ArmProcess | ArmGroup | OneLoop] = {
            label: OneLoop(self.process("one", devices=devices), label)
            if in_one_process
            else self._runner(str(number) if self.options.is_smoke else label, arm, devices)
            for number, (label, arm) in enumerate(arms.items())
        }
        for label, process in running.items():
            process.make(arms[label].make, **arms[label].params)
        wall: dict[str, list[float]] = {label: [] for label in arms}
        cpu: dict[str, list[float]] = {label: [] for label in arms}
        rounds = self.options.rounds * (1 if self.options.is_smoke else times_rounds)
        drawn = random.Random(f"{self._row} {size}")
        for number in range(1 + rounds):
            # An arm that always came after the same other one would carry what that leaves behind.
            for label in drawn.sample(list(running), len(running)):
                seconds = running[label].burst(count[label])
                if number:
                    wall[label].append(seconds[0])
                    cpu[label].append(seconds[1])
        return Race(
            self._row,
            size,
            {k: tuple(v) for k, v in wall.items()},
            {k: tuple(v) for k, v in cpu.items()},
            {label: process.facts() for label, process in running.items()},
        )

    def _runner(self, label: str, arm: Arm, devices: int) -> ArmProcess | ArmGroup:
        shown = None if arm.is_tensorflow else devices
        if arm.processes > 1:
            return self.group(label, arm.processes, devices=shown)
        return self.process(label, devices=shown)

    def without_tensorflow(self, what: str) -> SkipLine | None:
        """The line that says that a comparison is left out, where no TensorFlow was named."""
        if self.options.tensorflow is not None:
            return None
        return SkipLine(
            self._row,
            f"{what}: no TensorFlow named (--tensorflow PYTHON or JAXDIST_BENCH_TENSORFLOW)",
        )

    def close(self, label: str | None = None) -> None:
        """End all processes, or those of one arm."""
        for key in [k for k in self._processes if label in (None, k[0])]:
            self._processes.pop(key).close()
        for name in [k for k in self._groups if label in (None, k[0])]:
            self._groups.pop(name).close()

    def __enter__(self) -> "Bench":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)
