"""Runs pytest without a network, where it can write in one folder only, and ends all of it.

A mutant may delete the wrong folder, or start processes that never end. Namespaces of Linux prevent
it (`inside`). Runs are stopped after some time, or when they hold too much memory.
"""

import contextlib
import json
import os
import pathlib
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence

import psutil

_INSIDE = pathlib.Path(__file__).with_name("inside.py")
_WARM = pathlib.Path(__file__).with_name("warm.py")
# Several times what the largest test needs.
_MOST_BYTES = 10 * 2**30
_POLL_SECONDS = 0.2
# How long the kernel may take to end processes.
_TO_END = 60.0


def is_available() -> bool:
    """Return whether this machine can do it: Linux, where namespaces may be made."""
    if sys.platform != "linux":
        return False
    with tempfile.TemporaryDirectory() as folder:
        place = pathlib.Path(folder)
        return run(["true"], place, {}, place, 20, place / "output.txt") == 0


def run(
    command: Sequence[str],
    folder: pathlib.Path,
    environment: Mapping[str, str],
    writable: pathlib.Path,
    seconds: float,
    output: pathlib.Path,
) -> int | None:
    """Run a command in `folder`; return its exit status, or None if it was stopped."""
    needed = os.pathsep.join(_list_needed(folder))
    inside = [sys.executable, "-I", "-S", str(_INSIDE), str(writable), needed]
    with output.open("wb") as file:
        process = subprocess.Popen(
            [*inside, *command],
            cwd=folder,
            env={**environment, "HOME": "/tmp"},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def wait(some: float) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(some)
        return None

    try:
        return _watch(process.pid, wait, seconds)
    finally:
        _end(process.pid)
        process.wait()


def _list_needed(folder: pathlib.Path) -> list[str]:
    return [str(folder), sys.prefix, sys.base_prefix, str(_INSIDE.parent)]


class Warm:
    """Runs pytest in copies of a process that has imported the package; see `warm`."""

    def __init__(self, folder: pathlib.Path, environment: Mapping[str, str], package: str) -> None:
        self._folder = folder
        # Imports may write, too.
        self._own = tempfile.TemporaryDirectory(prefix="mutants-")
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_WARM), package],
            cwd=folder,
            env={"JAX_PLATFORMS": "cpu", **environment, "HOME": self._own.name},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )

    def run(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        writable: pathlib.Path,
        seconds: float,
        output: pathlib.Path,
    ) -> int | None:
        """Run pytest; return its exit status, or None if it was stopped."""
        output.touch()
        request = {
            "arguments": list(arguments),
            "environment": {**environment, "HOME": "/tmp"},
            "writable": str(writable),
            "needed": _list_needed(self._folder),
            "output": str(output),
        }
        answers = self._process.stdout
        assert self._process.stdin is not None
        assert answers is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        pid = int(answers.readline())
        answered: list[int] = []

        def wait(some: float) -> int | None:
            if not answered and select.select([answers], [], [], some)[0]:
                answered.append(int(answers.readline()))
            return answered[0] if answered else None

        status = _watch(pid, wait, seconds)
        if status is None:
            _end(pid)
            wait(_TO_END)
        return status

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
        self._own.cleanup()


def _watch(pid: int, wait: Callable[[float], int | None], seconds: float) -> int | None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        status = wait(_POLL_SECONDS)
        if status is not None:
            return status
        if _count_bytes(pid) > _MOST_BYTES:
            return None
    return None


def _end(pid: int) -> None:
    """End a process and all below it, and wait until they are gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        below = process.children(recursive=True)
        # With it ends the first process in the namespaces, and with that one all others there.
        process.kill()
        psutil.wait_procs(below, timeout=_TO_END)


def _count_bytes(pid: int) -> int:
    """Return how much memory all processes below one hold."""
    total = 0
    with contextlib.suppress(psutil.NoSuchProcess):
        for one in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                total += one.memory_info().rss
    return total
