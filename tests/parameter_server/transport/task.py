"""A task in a process of its own, which tests call, stop and kill.

`python -m tests.parameter_server.transport.task [port]` prints its address, and answers until its
input ends.
"""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from jaxdist._parameter_server.transport import Handler, Limits, Message, serve

ROOT = pathlib.Path(__file__).parents[3]
SECONDS_TO_START = 60


class Counter:
    """Counts the calls that were given to a handler."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0

    def add(self, request: Message) -> Message:
        """Count, and return the sum of each array."""
        with self._lock:
            self._count += 1
        return Message("", {"sums": [int(array.sum()) for array in request.arrays]})

    def get(self, request: Message) -> Message:
        """Return the count."""
        with self._lock:
            return Message("", {"count": self._count})


def make_handlers() -> dict[str, Handler]:
    """Return handlers for all kinds of calls."""
    counter = Counter()

    def pull(request: Message) -> Message:
        values = np.arange(request.fields["size"], dtype=np.int32)
        return Message("pull", {}, (values,))

    running: list[int] = []

    def wait(request: Message) -> Message:
        running.append(1)
        time.sleep(request.fields["seconds"])
        return Message("wait", {"pid": os.getpid()})

    return {
        "echo": lambda request: request,
        "add": counter.add,
        "count": counter.get,
        "pull": pull,
        "wait": wait,
        "running": lambda request: Message("", {"running": len(running)}),
        "pid": lambda request: Message("", {"pid": os.getpid(), "memory": resident_bytes()}),
    }


def resident_bytes() -> int:
    """Return the memory of this process."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class Task:
    """A task that runs."""

    def __init__(self, process: "subprocess.Popen[str]", address: str) -> None:
        self.process, self.address = process, address

    def signal(self, number: int) -> None:
        """Send a signal to it."""
        self.process.send_signal(number)
        if number == signal.SIGSTOP:
            # On a busy machine its threads run on for a moment.
            os.waitpid(self.process.pid, os.WUNTRACED)

    def kill(self) -> None:
        """End it, also if it is stopped, and wait until it has ended."""
        self.process.kill()
        self.process.wait(30)


@contextlib.contextmanager
def start_task(port: int = 0, environment: Mapping[str, str] | None = None) -> Iterator[Task]:
    """Start a task; it is killed at the end of the block."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.parameter_server.transport.task", str(port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
    )
    try:
        if process.stdout is None or not (address := process.stdout.readline().strip()):
            raise RuntimeError(f"the task ended with code {process.wait(SECONDS_TO_START)}")
        yield Task(process, address)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        process.wait(30)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def poll(condition: Callable[[], bool], seconds: float = 20) -> None:
    """Wait until a condition is true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition is still false"
        time.sleep(0.01)


def main(port: str) -> None:
    """Answer until the input ends."""
    limits = Limits(message_bytes=2**28, bytes_in_flight=2**29, reading_seconds=5.0)
    listener = serve(f"127.0.0.1:{port}", make_handlers(), layer="grpc", limits=limits)
    print(listener.address, flush=True)
    sys.stdin.read()
    listener.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
