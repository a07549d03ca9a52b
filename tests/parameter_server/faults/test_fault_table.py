"""Every fault of one task at every moment of a job with parameter servers, under the launcher.

The job finishes, and each function that was scheduled is counted once or reported as lost; or it
stops with an error that names the task that does not answer. No process is left.
"""

import contextlib
import dataclasses
import os
import pathlib
import signal
import time
from typing import Any

import pytest

from tests.launching.launcher import is_gone, start_launcher, wait_until
from tests.parameter_server.faults.table import (
    SCRIPT,
    START,
    find_processes,
    is_stopped,
    kill_what_is_left,
    read,
    wait_for_file,
)
from tests.processes.job import Job
from tests.tables import sampled

RPC_SECONDS = 2.0
# Longer than a server needs to start on a machine that does other things as well.
SERVER_SECONDS = 40.0
SHORT_SECONDS = 4.0
MARGIN = 10.0

FAULTS = ("kill", "stop", "stop and continue")
TASKS = ("worker", "ps", "chief")
MOMENTS = ("idle", "computing", "exchange", "snapshot", "restarting")
# Cells that cannot exist.
IMPOSSIBLE = {
    **{(fault, "worker", "snapshot"): "workers write no snapshots" for fault in FAULTS},
    **{
        ("stop", "chief", moment): (
            "the others wait for the chief, as TensorFlow's do: nobody is left who could raise an "
            "error, and whoever has stopped it continues it"
        )
        for moment in MOMENTS
    },
}


@dataclasses.dataclass(frozen=True)
class Cell:
    """A fault, the task that has it, and what it does at that moment."""

    fault: str
    task: str
    moment: str


ROWS = [
    Cell(fault, task, moment)
    for fault in FAULTS
    for task in TASKS
    for moment in MOMENTS
    if (fault, task, moment) not in IMPOSSIBLE
]


def _name(cell: Cell) -> str:
    return f"{cell.fault} {cell.task} {cell.moment}"


def test_the_cells_that_cannot_exist_say_why() -> None:
    assert all(IMPOSSIBLE.values())
    assert len(ROWS) + len(IMPOSSIBLE) == len(FAULTS) * len(TASKS) * len(MOMENTS)
    assert set(IMPOSSIBLE) <= {(f, t, m) for f in FAULTS for t in TASKS for m in MOMENTS}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("cell", sampled(ROWS, 2, name=_name))
def test_a_fault_of_one_task(cell: Cell, tmp_path: pathlib.Path) -> None:
    is_lasting = cell.fault == "stop" and cell.task == "ps"
    limit = SHORT_SECONDS if is_lasting else SERVER_SECONDS
    env: dict[str, str | None] = {
        "FAULT_FOLDER": str(tmp_path),
        "FAULT_WHO": f"{cell.task} 0",
        "FAULT_MOMENT": cell.moment,
        "JAXDIST_RPC_SECONDS": str(RPC_SECONDS),
        "JAXDIST_SERVER_SECONDS": str(limit),
        "JAXDIST_JOIN_SECONDS": str(START),
        "JAX_PLATFORMS": "cpu",
    }
    kills = 0 if cell.task != "chief" else (cell.fault == "kill") + (cell.moment == "restarting")
    how = ("--ps", "1", "--workers", "2", "--restarts", str(kills), "--grace-seconds", "1")
    with kill_what_is_left(tmp_path), start_launcher(*how, SCRIPT, env=env) as job:
        _hit(cell, tmp_path, job)
        began = time.time()
        (outcome,) = job.wait(START + limit + MARGIN)
    said = outcome.describe()
    assert not outcome.timed_out, said
    wait_until(lambda: not find_processes(tmp_path))
    result = read(tmp_path, "result")
    if is_lasting:
        assert outcome.exit_code != 0, said
        assert result["error"] in ("PSUnavailableError", "DeadlineExceededError"), said
        assert result["text"].startswith("ps 0 at 127.0.0.1"), said
        assert result["time"] - began < limit + 2 * RPC_SECONDS + MARGIN, said
        return
    assert outcome.exit_code == 0, said
    _check_counts(cell, result, said)


def _check_counts(cell: Cell, result: dict[str, Any], said: str) -> None:
    """Each function is counted once, or reported as lost; a counter variable proves it."""
    text = f"{result}\n{said}"
    assert result["error"] is None, text
    assert result["applied"] + result["lost"] == result["scheduled"] > 20, text
    if (cell.task, cell.fault) != ("ps", "kill") and (cell.task, cell.moment) != (
        "ps",
        "restarting",
    ):
        assert result["lost"] == 0, text
    assert result["count"] == result["requests"] == result["total"], text
    if cell.task == "chief" and (cell.fault == "kill" or cell.moment == "restarting"):
        # A worker may have been running a function of the chief before.
        assert 0 <= result["count"] - result["before"] - result["applied"] <= 2, text
    else:
        assert result["count"] == result["applied"], text


def _hit(cell: Cell, folder: pathlib.Path, job: Job) -> None:
    """Wait for the moment, and hit the task."""
    if cell.moment in ("idle", "restarting"):
        wait_for_file(folder, "idle", job)
    if cell.moment == "restarting":
        os.kill(read(folder, f"pid {cell.task} 0 1")["pid"], signal.SIGKILL)
    if cell.moment != "idle":
        # Where the chief soon gives up, it waits until the server is hit.
        if (cell.fault, cell.moment) != ("stop", "restarting"):
            (folder / "go on").touch()
        wait_for_file(folder, "reached", job)
        pid = read(folder, "reached")["pid"]
    else:
        pid = read(folder, f"pid {cell.task} 0 1")["pid"]
    if cell.fault == "kill":
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: is_gone(pid))
    else:
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: is_stopped(pid))
    for name in ("go", "go on"):
        (folder / name).touch()
    if cell.fault == "stop and continue":
        # Longer than the deadline of a call.
        time.sleep(RPC_SECONDS + 0.5)
        # The job may have finished without it.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
