"""What the other processes get when one process does something wrong in the middle of training."""

import dataclasses
import time
from typing import Any

import pytest

from tests.processes.job import start_job
from tests.strategies.multi_worker.faults import train_from_environment
from tests.tables import sampled


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault, and the error that it causes in the other processes."""

    name: str
    error: str
    says: str
    needs_limit: bool = False  # without a time limit the others wait


FAULTS = [
    Fault("kill", "UnavailableError", "has ended"),
    Fault("raise", "UnavailableError", "ValueError: this process has a problem"),
    Fault("exit", "UnavailableError", "has ended"),
    Fault("terminate", "UnavailableError", "has ended"),
    Fault("stop", "DeadlineExceededError", "stopped by a signal", needs_limit=True),
    Fault("loop", "DeadlineExceededError", "not inside the collective", needs_limit=True),
    Fault("sleep", "DeadlineExceededError", "not inside the collective", needs_limit=True),
    Fault("gil", "DeadlineExceededError", "silent", needs_limit=True),
    Fault("other_program", "ProgramMismatchError", "runs another program"),
    Fault("other_shape", "ProgramMismatchError", "runs another program"),
]
# On a busy machine a process may be a second late without any fault.
LIMIT = 4.0
ROWS = [(f, c, n) for f in FAULTS for c in (1, 0) for n in (2, 3)]


def _name(row: tuple[Fault, int, int]) -> str:
    return f"{row[0].name} in process {row[1]} of {row[2]}"


def _run(fault: Fault, culprit: int, count: int, limit: float | None) -> list[Any]:
    env = {
        "FAULT": fault.name,
        "CULPRIT": str(culprit),
        "LIMIT": str(limit or ""),
        "JAXDIST_HEARTBEAT_SECONDS": "5",
    }
    others = [i for i in range(count) if i != culprit]
    with start_job(train_from_environment, count, env=env) as job:
        end = time.monotonic() + 40
        while time.monotonic() < end and any(job.exit_code(i) is None for i in others):
            time.sleep(0.05)
        if job.exit_code(culprit) is None:
            job.kill(culprit)
        outcomes = job.wait(5)
    return [outcomes[i] for i in others]


@pytest.mark.parametrize("row", sampled(ROWS, 6, name=_name))
def test_a_fault_of_one_process_is_an_error_that_names_it_in_all_others(
    row: tuple[Fault, int, int],
) -> None:
    fault, culprit, count = row
    for outcome in _run(fault, culprit, count, LIMIT if fault.needs_limit else None):
        assert outcome.exit_code == 0, outcome.describe()
        seen = outcome.result
        # With two processes nobody knows whose program is wrong: process 0 counts as right.
        named = [1] if count == 2 and fault.error == "ProgramMismatchError" else [culprit]
        assert (seen["error"], list(seen["processes"])) == (fault.error, named), seen["message"]
        first = seen["message"].split("\n\n")[0]
        assert f"process {named[0]}" in first
        assert all(f"process {i}" not in first for i in range(count) if i != named[0])
        assert fault.says in seen["message"]
        assert seen["seconds"] < LIMIT + 8
        # The process lives, and its device is free.
        assert seen["local"] == 10.0
