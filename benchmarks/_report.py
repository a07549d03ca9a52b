"""What is printed and written at the end."""

import json
import os
import pathlib
import platform
import resource
import time
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks._lines import Line, NoteLine, SkipLine

LARGEST_LOAD = 3.0
_WORDS = {True: "[green]yes[/]", False: "[bold red]NO[/]", None: "-"}


class Machine:
    """How busy the machine was, and how much of that was not ours."""

    def __init__(self) -> None:
        self.load_before = os.getloadavg()[0]
        self._start = (time.monotonic(), _busy_s(), _own_s())

    def sentence(self) -> str:
        """Load before, the share of other processes meanwhile, and what that means."""
        started, busy, own = self._start
        cores = os.cpu_count() or 1
        others = max(_busy_s() - busy - (_own_s() - own), 0.0)
        share = others / max((time.monotonic() - started) * cores, 1e-9)
        text = (
            f"{cores} cores; load average {self.load_before:.1f} before; other processes used "
            f"{share:.0%} of the machine meanwhile"
        )
        if self.load_before > LARGEST_LOAD:
            text += f"\nload average above {LARGEST_LOAD:g}: time rows are unreliable"
        return text

    @property
    def is_loaded(self) -> bool:
        """Whether times cannot be trusted."""
        return self.load_before > LARGEST_LOAD


def _busy_s() -> float:
    """CPU seconds that all processes of this machine have used."""
    path = pathlib.Path("/proc/stat")
    if not path.exists():
        return 0.0
    user, nice, system, _, _, irq, soft = map(int, path.read_text().split()[1:8])
    return (user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    """CPU seconds of this process and of its children that have ended."""
    used = [resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def versions() -> dict[str, str]:
    """What was measured."""
    found = {name: metadata.version(name) for name in ("jax", "jaxlib", "flax", "numpy")}
    return {"python": platform.python_version(), **found}


def table(lines: Sequence[Line]) -> Table:
    """All comparisons, one per line."""
    result = Table(title="ratio: median of the ratios of each round; CPU: the same of process time")
    for title in ("row", "N", "arm", "comparator", "per step", "ratio", "min..max", "CPU", "need"):
        result.add_column(title, justify="right" if title in ("ratio", "CPU") else "left")
    result.add_column("met")
    for line in lines:
        if isinstance(line, (SkipLine, NoteLine)):
            continue
        cells = (line.row, line.size, line.arm, line.comparator, *line.cells())
        result.add_row(*cells, _WORDS[line.met])
    return result


def show(console: Console, lines: Sequence[Line], machine: Machine) -> None:
    """Print the table, what was left out, and how far to trust it."""
    console.print(table(lines))
    for line in lines:
        if isinstance(line, SkipLine):
            console.print(f"row {line.row} skipped: {line.why}", style="yellow", highlight=False)
        if isinstance(line, NoteLine):
            console.print(f"row {line.row}: {line.what}", highlight=False, markup=False)
    console.print(", ".join(f"{k} {v}" for k, v in versions().items()), highlight=False)
    console.print(machine.sentence(), highlight=False)
    failed = [line for line in lines if line.met is False]
    rows = ", ".join(dict.fromkeys(line.row for line in failed))
    console.print(f"{len(failed)} not met: rows {rows}" if failed else "all needs met")


def write_json(path: pathlib.Path, lines: Sequence[Line], machine: Machine) -> None:
    """Write everything that was measured."""
    content: dict[str, Any] = {
        "versions": versions(),
        "machine": machine.sentence(),
        "lines": [line.as_json() for line in lines],
    }
    path.write_text(json.dumps(content, indent=1) + "\n")
