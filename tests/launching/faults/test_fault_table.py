"""Every fault of one process, at every moment of a job under `jaxdist launch`.

Every other process raises the documented error, which names the culprit, or ends its work, within
the time limit and some seconds; none of them ends by SIGABRT, no process is left, and the
checkpoint restores.
"""

import dataclasses
import json
import os
import pathlib
import signal
import time
from typing import Any

import numpy as np
import pytest

import jaxdist
from tests.launching.launcher import is_gone, start_launcher, wait_until
from tests.tables import sampled

SCRIPT = str(pathlib.Path(__file__).with_name("job.py"))
LIMIT = 3.0
JOIN = 8.0
# Starting Python and JAX, on a machine that does other things as well.
START = 60.0
# `gil` is known by its silence, which takes some seconds more.
MARGIN = 8.0

MOMENTS = ("start", "compile", "step", "reduce", "checkpoint", "shutdown")
ENDS = ("kill", "raise", "exit", "terminate")
HANGS = ("stop", "sleep", "loop", "gil")
OTHERS = ("program", "shape", "data")
# Cells that cannot exist.
IMPOSSIBLE = {
    **{
        (fault, moment): "nothing is computed at that moment that could differ"
        for fault in ("program", "shape")
        for moment in ("start", "checkpoint", "shutdown")
    },
    **{
        (fault, "step"): "the program of a step that has run is compared before its first run"
        for fault in ("program", "shape")
    },
    **{
        ("data", moment): "data ends between two steps"
        for moment in ("start", "compile", "reduce", "checkpoint", "shutdown")
    },
    ("exit", "shutdown"): "a job whose program has ended exits with 0",
}


@dataclasses.dataclass(frozen=True)
class Cell:
    """A fault, the process that has it, and when."""

    fault: str
    moment: str
    culprit: int

    @property
    def errors(self) -> set[str | None]:
        """What the others may see; None: their work is done."""
        if self.moment == "shutdown":
            return {None}
        if self.fault in OTHERS:
            return {"UnavailableError" if self.fault == "data" else "ProgramMismatchError"}
        if self.moment == "start":
            # The launcher ends processes that wait for one that has failed.
            return {"ClusterError", "ended"} if self.fault in ENDS else {"ClusterError"}
        return {"UnavailableError" if self.fault in ENDS else "DeadlineExceededError"}


ROWS = [
    Cell(fault, moment, culprit)
    for fault in (*ENDS, *HANGS, *OTHERS)
    for moment in MOMENTS
    for culprit in (0, 1)
    if (fault, moment) not in IMPOSSIBLE
]


def _name(cell: Cell) -> str:
    return f"{cell.fault} in process {cell.culprit} at {cell.moment}"


def test_the_cells_that_cannot_exist_say_why() -> None:
    assert all(IMPOSSIBLE.values())
    assert len(ROWS) + 2 * len(IMPOSSIBLE) == 2 * len(MOMENTS) * (len(ENDS) + len(HANGS) + 3)


def _read(folder: pathlib.Path, index: int) -> dict[str, Any] | None:
    path = folder / f"{index}.json"
    return json.loads(path.read_text()) if path.exists() else None


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("cell", sampled(ROWS, 3, name=_name))
def test_a_fault_under_the_launcher(cell: Cell, tmp_path: pathlib.Path) -> None:
    env: dict[str, str | None] = {
        "FAULT": cell.fault,
        "FAULT_MOMENT": cell.moment,
        "FAULT_PROCESS": str(cell.culprit),
        "FAULT_OUT": str(tmp_path),
        "FAULT_LIMIT": str(LIMIT),
        "JAXDIST_JOIN_SECONDS": str(JOIN),
        "JAXDIST_HEARTBEAT_SECONDS": "5",
        "JAX_PLATFORMS": "cpu",
    }
    other = 1 - cell.culprit
    with start_launcher("-n", "2", SCRIPT, env=env) as job:
        if cell.fault in HANGS and cell.moment == "shutdown":
            # The others have ended, and nobody waits for this process but the launcher.
            _wait_for_work(tmp_path, other)
            pid = (_read(tmp_path, cell.culprit) or {})["pid"]
            _end(pid)
        (outcome,) = job.wait(START + JOIN + LIMIT + MARGIN)
    assert not outcome.timed_out, outcome.describe()
    assert "SIGABRT" not in outcome.stderr, outcome.describe()
    assert outcome.exit_code != 0, outcome.describe()
    assert f"process {cell.culprit}" in outcome.stderr or cell.fault in ("program", "shape")
    seen = _read(tmp_path, other)
    _check(cell, seen, outcome.describe())
    for index in range(2):
        note = _read(tmp_path, index)
        assert note is None or is_gone(note["pid"])
    _check_checkpoint(tmp_path)


def _wait_for_work(folder: pathlib.Path, index: int) -> None:
    wait_until(lambda: "w" in (_read(folder, index) or {}), 100)
    time.sleep(0.5)


def _end(pid: int) -> None:

    os.kill(pid, signal.SIGKILL)


def _check(cell: Cell, seen: dict[str, Any] | None, description: str) -> None:
    if seen is None:
        assert "ended" in cell.errors, description
        return
    assert seen.get("error") in cell.errors, f"{seen}\n{description}"
    if seen.get("error") is None:
        return
    # With two processes nobody knows whose program is wrong: process 0 counts as right.
    is_mismatch = seen["error"] == "ProgramMismatchError"
    culprit = 1 if is_mismatch else cell.culprit
    first = seen["message"].split("\n\n")[0]
    assert f"process {culprit}" in first
    if seen["error"] != "ClusterError":
        assert seen["processes"] == [culprit]
    assert seen["local"] == 10.0


def _check_checkpoint(folder: pathlib.Path) -> None:
    """Restore the newest checkpoint, if one was completed."""
    checkpoints = jaxdist.training.Checkpoints(folder / "checkpoints")
    for step in checkpoints.steps():
        restored = checkpoints.restore(step, like={"w": np.zeros((), "float32")})
        assert np.isfinite(restored.state["w"])
