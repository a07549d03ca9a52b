"""`jaxdist launch` in a process of its own, which tests signal, and scripts that it starts."""

import contextlib
import os
import pathlib
import re
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Iterator

from jaxdist.cli import main
from tests.processes.job import Job, Outcome, start_job

# In front of each script: the number of the process, and its pid for the test.
START = """
import json, os, pathlib, signal, subprocess, sys, time
index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
# Whole, since the launcher may end the process at any moment.
os.write(1, f"pid {os.getpid()}\\n".encode())


class UnavailableError(Exception):
    __module__ = "jaxdist.errors"


def wait_for(name):
    path = pathlib.Path(name)
    while not path.exists():
        time.sleep(0.005)
    return path
"""

QUICK = ("--report-seconds", "0.2", "--grace-seconds", "0.5")


def run_main(argv: list[str]) -> None:
    """Run the command in this process."""
    # Where the tests run in the background of a shell, SIGINT is ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # `nohup` ignores this one.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    sys.exit(main(argv))


def write_script(folder: pathlib.Path, source: str) -> str:
    """Write a script that starts with START, and return its path."""
    path = folder / "script.py"
    path.write_text(START + textwrap.dedent(source))
    return str(path)


@contextlib.contextmanager
def start_launcher(*argv: str, env: dict[str, str | None] | None = None) -> Iterator[Job]:
    """Start `jaxdist launch` with arguments."""
    variables = {"TF_CONFIG": None, **(env or {})}
    arguments = (["launch", *argv],)
    with start_job(run_main, 1, args=arguments, service=False, env=variables) as job:
        yield job


def run_launcher(
    *argv: str, timeout: float = 60, env: dict[str, str | None] | None = None
) -> Outcome:
    """Run `jaxdist launch` to its end."""
    with start_launcher(*argv, env=env) as job:
        (outcome,) = job.wait(timeout)
    assert not outcome.timed_out, outcome.describe()
    return outcome


def find_pids(text: str) -> list[int]:
    """Return the pids that scripts printed."""
    return [int(pid) for pid in re.findall(r"^\[\d+\] pid (\d+)$", text, re.MULTILINE)]


def is_gone(pid: int) -> bool:
    """Whether no process with this pid runs; one that nobody has waited for does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    stat = pathlib.Path(f"/proc/{pid}/stat")
    try:
        return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_until(is_true: Callable[[], bool], seconds: float = 20) -> None:
    """Wait until something is true; the test fails if it never is."""
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline, f"not true after {seconds} s"
        time.sleep(0.005)


def check_nobody_is_left(outcome: Outcome, count: int) -> None:
    """All processes of the job have started, and none runs."""
    pids = find_pids(outcome.stdout)
    assert len(pids) == count, outcome.describe()
    assert all(map(is_gone, pids))
