"""The time of a step from a profile: against events whose times are known."""

import gzip
import json
import pathlib
from typing import Any

import pytest
import rich.console

from jaxdist._explain import BATCH, DISPATCH, STEP, read_step_times
from jaxdist.errors import NotFoundError

Event = dict[str, Any]
CATEGORIES = {
    "dot.1": "matrix products",
    "psum.2": "collectives",
    "while.3": "",
    "copy.4": "copies",
}


def event(name: str, start: float, length: float, pid: int = 1, tid: int = 1, **args: str) -> Event:
    return {
        "ph": "X",
        "name": name,
        "ts": start,
        "dur": length,
        "pid": pid,
        "tid": tid,
        "args": args,
    }


def on_cpu(name: str, start: float, length: float, device: int) -> Event:
    return event(name, start, length, hlo_op=name, device_ordinal=str(device))


def named(kind: str, name: str, pid: int, tid: int = 0) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def write(folder: pathlib.Path, events: list[Event]) -> pathlib.Path:
    folder.mkdir(parents=True, exist_ok=True)
    with gzip.open(folder / "perfetto_trace.json.gz", "wt") as file:
        json.dump({"traceEvents": [named("process_name", "/host:CPU", 1), *events]}, file)
    return folder


def test_the_time_of_a_step_is_divided_without_gap_or_overlap(tmp_path: pathlib.Path) -> None:
    events = [
        event(STEP, 0, 100),
        event(BATCH, 0, 10),
        event(DISPATCH, 10, 20),
        # Device 0 computes, communicates meanwhile and alone, and then has nothing to do.
        on_cpu("while.3", 30, 60, 0),
        on_cpu("dot.1", 30, 20, 0),
        on_cpu("psum.2", 40, 30, 0),
        on_cpu("other.9", 75, 5, 0),
        # Device 1 begins while the host still dispatches.
        on_cpu("dot.1", 20, 20, 1),
        on_cpu("copy.4", 40, 10, 1),
        on_cpu("psum.2", 50, 20, 1),
        # Outside of the step.
        on_cpu("dot.1", 200, 50, 0),
    ]
    times = read_step_times(write(tmp_path / "a", events), "train", CATEGORIES)
    assert (times.num_steps, times.num_devices) == (1, 2)
    assert times.step_seconds == pytest.approx(100e-6)
    expected = {
        "matrix products": (20 + 20) / 2,
        "other compute": 5 / 2,
        "copies": 10 / 2,
        "collectives": (20 + 20) / 2,
        "host: next batch": 10,
        "host: dispatch": (20 + 10) / 2,
        "idle": (5 + 20 + 30) / 2,
    }
    assert times.by_category == pytest.approx({k: v * 1e-6 for k, v in expected.items()})
    assert sum(times.by_category.values()) == pytest.approx(times.step_seconds)
    assert times.hidden_seconds == pytest.approx(10e-6 / 2)
    longest = times.operations[0]
    assert (longest.name, longest.category) == ("psum.2", "collectives")
    assert longest.seconds == pytest.approx((30 + 20) * 1e-6 / 2)
    assert longest.runs == 1


def test_times_are_the_mean_of_steps(tmp_path: pathlib.Path) -> None:
    events = [event(STEP, 0, 10), event(STEP, 50, 30), on_cpu("dot.1", 0, 10, 0)]
    times = read_step_times(write(tmp_path, [*events, on_cpu("dot.1", 55, 20, 0)]), "t", CATEGORIES)
    assert times.step_seconds == pytest.approx(20e-6)
    assert times.by_category["matrix products"] == pytest.approx(15e-6)
    assert times.by_category["idle"] == pytest.approx(5e-6)
    assert times.operations[0].runs == 1


@pytest.mark.parametrize("kind", ["GPU", "TPU"])
def test_devices_that_are_processes_of_the_profile_are_read(
    kind: str, tmp_path: pathlib.Path
) -> None:
    work: list[Event] = []
    for number in range(2):
        pid = 10 + number
        work += [
            named("process_name", f"/device:{kind}:{number}", pid),
            named("thread_name", "XLA Ops", pid, 5),
            named("thread_name", "Steps", pid, 6),
            event("dot.1", 10, 30, pid, 5, **({"hlo_op": "dot.1"} if kind == "GPU" else {})),
            # The line of whole steps is no operation.
            event("12", 0, 100, pid, 6),
        ]
    times = read_step_times(write(tmp_path, [event(STEP, 0, 100), *work]), "train", CATEGORIES)
    assert times.num_devices == 2
    assert times.by_category["matrix products"] == pytest.approx(30e-6)
    assert times.by_category["idle"] == pytest.approx(70e-6)


def test_an_operation_that_the_program_does_not_have_is_known_by_its_name(
    tmp_path: pathlib.Path,
) -> None:
    events = [event(STEP, 0, 10), on_cpu("all-gather.7", 0, 4, 0), on_cpu("add.1", 4, 2, 0)]
    times = read_step_times(write(tmp_path, events), "train", {})
    assert times.by_category["collectives"] == pytest.approx(4e-6)
    assert times.by_category["other compute"] == pytest.approx(2e-6)


def test_the_newest_profile_is_read_and_all_of_it_is_printed(tmp_path: pathlib.Path) -> None:
    write(tmp_path / "2026_01_01", [event(STEP, 0, 1)])
    write(tmp_path / "2026_01_02", [event(STEP, 0, 200), on_cpu("psum.2", 0, 50, 0)])
    times = read_step_times(tmp_path, "train", CATEGORIES)
    text = str(times)
    assert text.startswith("Profile of train: 1 step on 1 device, 200 us a step\n")
    assert "\n  collectives   50 us   25%\n" in text
    assert "\n  idle         150 us   75%\n" in text
    assert "2026_01_02" in text
    console = rich.console.Console(width=120)
    with console.capture() as capture:
        console.print(times)
    assert "collectives" in capture.get()


def test_a_profile_without_devices_shows_the_host(tmp_path: pathlib.Path) -> None:
    times = read_step_times(write(tmp_path, [event(STEP, 0, 10), event(BATCH, 0, 4)]), "t", {})
    assert times.by_category["host: next batch"] == pytest.approx(4e-6)
    assert times.by_category["idle"] == pytest.approx(6e-6)
    assert times.operations == ()


def test_a_folder_without_a_profile_of_steps_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(NotFoundError, match=r"has no file perfetto_trace\.json\.gz"):
        read_step_times(tmp_path, "train", {})
    with pytest.raises(NotFoundError, match="has no event 'jaxdist step'"):
        read_step_times(write(tmp_path, []), "train", {})
