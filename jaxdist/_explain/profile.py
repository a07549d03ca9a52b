"""Reads the time of a step, by category, from a profile of JAX."""

import collections
import dataclasses
import gzip
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxdist._reports import Report, Table, plural, seconds, share
from jaxdist._validate import as_local_path
from jaxdist.errors import NotFoundError

# The annotations of a traced loop: the step, and the work of the host in it.
STEP, BATCH, DISPATCH = "jaxdist step", "jaxdist batch", "jaxdist dispatch"
_COMPUTE = "other compute"
# If several things happen at the same time, the first counts: a step waits for what nothing hides.
PRIORITY = (
    "matrix products",
    _COMPUTE,
    "copies",
    "collectives",
    "host: next batch",
    "host: dispatch",
)
IDLE = "idle"
_HOST = {BATCH: "host: next batch", DISPATCH: "host: dispatch"}
_DEVICE = re.compile(r"/device:(?P<kind>[A-Z]+):(?P<number>\d+)")
_COLLECTIVE = re.compile(r"^(all-|reduce-scatter|collective-|psum|ragged-all|ncclk)", re.IGNORECASE)
_MOST_OPERATIONS = 10
_MICRO = 1e-6

Interval = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation of the compiled program: its time on a device in a step, and its runs there."""

    name: str
    category: str
    seconds: float
    runs: float


@dataclasses.dataclass(frozen=True, repr=False)
class StepTimes(Report):
    """Where the time of a step goes: the mean over steps and devices.

    Args:
        name: The name of the step.
        num_steps: The number of steps.
        num_devices: The number of devices.
        step_seconds: The time of a step, from its batch to its last result.
        by_category: The seconds of each category. Their sum is `step_seconds`. If several things
            happen at the same time, the first of matrix products, other compute, copies,
            collectives and host counts.
        hidden_seconds: The time of collectives while the device also computes.
        operations: The operations of the devices, the longest first.
        path: The file with the profile.
    """

    name: str
    num_steps: int
    num_devices: int
    step_seconds: float
    by_category: Mapping[str, float]
    hidden_seconds: float
    operations: tuple[Operation, ...]
    path: Path

    def parts(self) -> Iterator[Table | str]:
        """Yield tables and sentences."""
        yield (
            f"Profile of {self.name}: {plural(self.num_steps, 'step')} on "
            f"{plural(self.num_devices, 'device')}, {seconds(self.step_seconds)} a step"
        )
        columns = ("what", "time", "part")
        rows = (
            (name, seconds(value), share(value / self.step_seconds))
            for name, value in self.by_category.items()
            if value
        )
        yield Table("Time of a step", columns, tuple(rows), frozenset(columns[1:]))
        if self.hidden_seconds:
            yield f"Collectives hidden behind compute: {seconds(self.hidden_seconds)}"
        if self.operations:
            columns = ("operation", "what", "time", "runs")
            shown = self.operations[:_MOST_OPERATIONS]
            yield Table(
                "Longest operations of a device",
                columns,
                tuple((o.name, o.category, seconds(o.seconds), f"{o.runs:.3g}") for o in shown),
                frozenset({"time", "runs"}),
            )
        yield (
            "The profile waits for each step, so that its parts can be measured; training "
            "dispatches the next step meanwhile."
        )
        yield f"Profile: {self.path} (open it at https://ui.perfetto.dev, or with TensorBoard)"


@dataclasses.dataclass(frozen=True)
class _Event:
    """An operation of a device, in microseconds."""

    device: str
    name: str
    category: str
    start: float
    end: float


def read_step_times(folder: str | Path, name: str, categories: Mapping[str, str]) -> StepTimes:
    """Return the times of the traced steps.

    Args:
        folder: The folder that `jax.profiler.trace(..., create_perfetto_trace=True)` wrote.
        name: The name of the step.
        categories: The category of each instruction of its program; see `hlo.categories`.

    Raises:
        NotFoundError: The folder has no profile, or the profile has no step.
    """
    path = _find_file(
        Path(as_local_path(f"A profile was to be read from {str(folder)!r}", str(folder)))
    )
    with gzip.open(path, "rt") as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    steps = sorted((e["ts"], e["ts"] + e["dur"]) for e in _select(events, STEP))
    if not steps:
        raise NotFoundError(
            f"{path} has no event {STEP!r}, of {len(events):,} events.\n\n"
            "A step is marked with jax.profiler.TraceAnnotation.\n\n"
            "Record the profile with: jaxdist trace CONFIG."
        )
    on_host = {
        category: [(e["ts"], e["ts"] + e["dur"]) for e in _select(events, mark)]
        for mark, category in _HOST.items()
    }
    work = list(_list_operations(events, categories))
    devices = sorted({e.device for e in work})
    totals, hidden = dict.fromkeys((*PRIORITY, IDLE), 0.0), 0.0
    # Without any operation on a device, only the host is visible.
    for device in devices or [""]:
        own = [e for e in work if e.device == device]
        for step in steps:
            found, covered = _divide(step, own, on_host)
            hidden += covered
            for category, value in found.items():
                totals[category] += value
    scale = _MICRO / (len(steps) * max(1, len(devices)))
    inside = [e for e in work if any(a <= e.start < b for a, b in steps)]
    return StepTimes(
        name,
        len(steps),
        len(devices),
        sum(end - start for start, end in steps) * _MICRO / len(steps),
        {category: value * scale for category, value in totals.items()},
        hidden * scale,
        tuple(_sum_operations(inside, scale)),
        path,
    )


def _find_file(folder: Path) -> Path:
    found = sorted(folder.rglob("perfetto_trace.json.gz"))
    if not found:
        raise NotFoundError(
            f"{str(folder)!r} has no file perfetto_trace.json.gz.\n\n"
            "jax.profiler.trace writes it with create_perfetto_trace=True.\n\n"
            "Record the profile with: jaxdist trace CONFIG."
        )
    # The names of the folders are times, so the last one is the newest.
    return found[-1]


def _select(events: Iterable[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [e for e in events if e.get("ph") == "X" and e["name"] == name]


def _list_operations(
    events: Sequence[dict[str, Any]], categories: Mapping[str, str]
) -> Iterator[_Event]:
    """Yield the operations of all devices.

    CPU devices write them as events of host threads, with the number of the device. GPUs
    and TPUs are processes of the profile.
    """
    processes: dict[int, str] = {}
    threads: dict[tuple[int, int], str] = {}
    for e in events:
        if e.get("ph") == "M" and e["name"] == "process_name":
            processes[e["pid"]] = e["args"]["name"]
        elif e.get("ph") == "M" and e["name"] == "thread_name":
            threads[e["pid"], e["tid"]] = e["args"]["name"]
    for e in events:
        if e.get("ph") != "X":
            continue
        arguments = e.get("args", {})
        device = _DEVICE.search(processes.get(e["pid"], ""))
        operation = arguments.get("hlo_op")
        if device is not None and threads.get((e["pid"], e["tid"])) == "XLA Ops":
            operation = operation or e["name"]
        if operation is None:
            continue
        where = arguments.get("device_ordinal", "0") if device is None else device[0]
        category = categories.get(operation)
        if category is None:
            # A small program outside the step, such as one that places a batch.
            category = "collectives" if _COLLECTIVE.search(operation) else _COMPUTE
        if category:
            yield _Event(str(where), operation, category, e["ts"], e["ts"] + e.get("dur", 0.0))


def _divide(
    step: Interval, work: Sequence[_Event], on_host: Mapping[str, Sequence[Interval]]
) -> tuple[dict[str, float], float]:
    """Divide the time of a step on one device; also return the time of hidden collectives.

    Between two moments at which something starts or ends, nothing changes. So each such interval
    goes to the first category that is active in it.
    """
    spans: dict[str, list[Interval]] = {c: list(found) for c, found in on_host.items()}
    for event in work:
        spans.setdefault(event.category, []).append((event.start, event.end))
    moments: list[tuple[float, int, str]] = []
    for category, found in spans.items():
        for start, end in found:
            first, last = max(start, step[0]), min(end, step[1])
            if first < last:
                moments += [(first, 1, category), (last, -1, category)]
    moments.sort()
    totals, hidden = dict.fromkeys((*PRIORITY, IDLE), 0.0), 0.0
    active: collections.Counter[str] = collections.Counter()
    now = step[0]
    for moment, change, category in [*moments, (step[1], 0, IDLE)]:
        first_active = next((c for c in PRIORITY if active[c]), IDLE)
        totals[first_active] += moment - now
        if active["collectives"] and first_active != "collectives":
            hidden += moment - now
        active[category] += change
        now = moment
    return totals, hidden


def _sum_operations(work: Iterable[_Event], scale: float) -> list[Operation]:
    times: dict[tuple[str, str], float] = collections.defaultdict(float)
    runs: collections.Counter[tuple[str, str]] = collections.Counter()
    for event in work:
        times[event.name, event.category] += event.end - event.start
        runs[event.name, event.category] += 1
    return [
        Operation(name, category, value * scale, runs[name, category] * scale / _MICRO)
        for (name, category), value in sorted(times.items(), key=lambda item: -item[1])
    ]
