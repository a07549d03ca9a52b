"""Two loops timed in turns, in this process: an accelerator belongs to one process at a time."""

import random
import statistics
from collections.abc import Callable, Mapping

from benchmarks._lines import Need, TimeLine
from benchmarks._loop import Loop
from benchmarks._worker import timed

ROUNDS = 9


def race(
    row: str,
    size: str,
    arms: Mapping[str, Callable[[], Loop]],
    steps: int,
    need: Need,
    *,
    is_smoke: bool,
) -> tuple[TimeLine, dict[str, Loop]]:
    """A warm round, then bursts in an order that is drawn; the first arm against the second."""
    loops = {name: make() for name, make in arms.items()}
    wall: dict[str, list[float]] = {name: [] for name in arms}
    cpu: dict[str, list[float]] = {name: [] for name in arms}
    count = max(2, steps // 100) if is_smoke else steps
    drawn = random.Random(f"{row} {size}")
    for number in range(1 + (1 if is_smoke else ROUNDS)):
        for name in drawn.sample(list(loops), len(loops)):
            spent = timed(loops[name], count)
            if number:
                wall[name].append(spent["wall"] / count)
                cpu[name].append(spent["cpu"] / count)
    arm, comparator = arms
    ratios = tuple(a / max(b, 1e-12) for a, b in zip(wall[arm], wall[comparator], strict=True))
    used = [a / max(b, 1e-12) for a, b in zip(cpu[arm], cpu[comparator], strict=True)]
    line = TimeLine(
        row,
        size,
        arm,
        comparator,
        statistics.median(wall[arm]) * 1e6,
        statistics.median(wall[comparator]) * 1e6,
        ratios,
        statistics.median(used),
        need,
    )
    return line, loops
