"""What the tests of this folder share: jobs of `job.py`, their files and their processes."""

import contextlib
import json
import os
import pathlib
import signal
import time
from collections.abc import Iterator
from typing import Any

from tests.launching.launcher import is_gone
from tests.processes.job import Job

SCRIPT = str(pathlib.Path(__file__).with_name("job.py"))
START = 100.0


def wait_for_file(folder: pathlib.Path, name: str, job: Job) -> None:
    """Wait until a task has written a file."""
    deadline = time.monotonic() + START
    while not (folder / name).exists():
        is_late = time.monotonic() > deadline or job.exit_code(0) is not None
        assert not is_late, f"no {name!r}:\n{job.errors(0)}\n{job.lines(0)}"
        time.sleep(0.005)


def is_stopped(pid: int) -> bool:
    """Whether a process was stopped by a signal."""
    stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    return stat.rpartition(")")[2].split()[0] == "T"


def read(folder: pathlib.Path, name: str) -> dict[str, Any]:
    """Return what a task has written."""
    return json.loads((folder / name).read_text())


def find_processes(folder: pathlib.Path) -> list[int]:
    """Return the processes that have this folder in their environment."""
    wanted = f"FAULT_FOLDER={folder}\0".encode()
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
        # Of another user, or gone.
        with contextlib.suppress(OSError):
            if wanted in path.read_bytes() + b"\0":
                found.append(int(path.parent.name))
    return [pid for pid in found if not is_gone(pid)]


@contextlib.contextmanager
def kill_what_is_left(folder: pathlib.Path) -> Iterator[None]:
    """Kill the tasks also when the test fails."""
    try:
        yield
    finally:
        for pid in find_processes(folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
