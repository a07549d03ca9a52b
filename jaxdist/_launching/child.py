"""`Child`: one process of a job, seen from the launcher."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from jaxdist._launching.ends import End, read_record
from jaxdist._launching.output import PrefixedOutput
from jaxdist.errors import LaunchError

_BOOTSTRAP = pathlib.Path(__file__).with_name("bootstrap.py")
_CHUNK = 1 << 16

Write = Callable[[bytes], None]


class Child:
    """A process that runs in its own process group.

    Args:
        index: Its number in the job.
        command: The program and its arguments.
        environment: All of its environment variables.
        write: Two functions that take lines: of its standard output, and of its standard error.
        name: The prefix of its lines; None for its number.

    Raises:
        LaunchError: The system cannot start it.
    """

    def __init__(
        self,
        index: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        write: tuple[Write, Write],
        name: str | None = None,
    ) -> None:
        self.index = index
        self.end: End | None = None
        self._was_ended = False
        # -I and -S: the first program needs no packages of the user, and starts faster.
        first = [sys.executable, "-I", "-S", str(_BOOTSTRAP), str(os.getpid())]
        try:
            self._process = subprocess.Popen(
                [*first, *command],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                process_group=0,
            )
        except OSError as error:
            raise LaunchError(
                f"jaxdist launch could not start {name or f'process {index}'}: {error}.\n\n"
                f"The command was: {' '.join(command)}\n\n"
                "Start fewer processes, or raise the limits of the system (ulimit -u, ulimit -n)."
            ) from error
        self.pid = self._process.pid
        shown = index if name is None else name
        self._errors = PrefixedOutput(shown, write[1])
        outputs = (PrefixedOutput(shown, write[0]), self._errors)
        pipes = (self._process.stdout, self._process.stderr)
        self.streams: dict[IO[bytes], PrefixedOutput] = {}
        for pipe, output in zip(pipes, outputs, strict=True):
            if pipe is not None:  # Always: both are PIPE.
                os.set_blocking(pipe.fileno(), False)
                self.streams[pipe] = output

    def open_end(self) -> int | None:
        """Return a file descriptor that becomes readable when the process ends, or None."""
        if hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):
                return os.pidfd_open(self.pid)
        return None

    def read(self, pipe: IO[bytes]) -> bool:
        """Write what a pipe holds; return False at its end."""
        try:
            chunk = os.read(pipe.fileno(), _CHUNK)
        except BlockingIOError:
            return True
        self.streams[pipe].feed(chunk)
        return bool(chunk)

    def signal(self, number: int, *, to_group: bool = False) -> None:
        """Send a signal to the process, or to all processes of its group."""
        if self.end is None:
            with contextlib.suppress(ProcessLookupError):
                (os.killpg if to_group else os.kill)(self.pid, number)

    def ask_to_end(self) -> None:
        """Ask the process to end because of another one; it may clean up."""
        self._was_ended = True
        self.signal(signal.SIGTERM)
        # A stopped process receives SIGTERM only when it continues.
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        """End the process and its group at once."""
        self._was_ended = True
        self.signal(signal.SIGKILL, to_group=True)

    def hear(self, end: End) -> None:
        """Do nothing: the process reads how another one ended in the launcher's folder."""

    def collect(self, folder: pathlib.Path) -> End | None:
        """Return how the process ended, once it has, and write the rest of its output."""
        if self.end is not None or not self._has_ended():
            return self.end
        # Before `wait`, after which the system may reuse the number of the group.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        for pipe, output in self.streams.items():
            self._drain(pipe)
            output.finish()
            pipe.close()
        code = self._process.wait()
        record = read_record(folder, self.index)
        tail = self._errors.read_tail()
        self.end = End(self.index, code, was_ended=self._was_ended, tail=tail, record=record)
        return self.end

    def abandon(self) -> None:
        """Wait for a process that was killed. Its output is not written."""
        for pipe in self.streams:
            pipe.close()
        self._process.wait()

    def _has_ended(self) -> bool:
        # Without `waitid` (macOS before Python 3.13), asking also reaps the process.
        if not hasattr(os, "waitid"):
            return self._process.poll() is not None
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self.pid, options) is not None

    def _drain(self, pipe: IO[bytes]) -> None:
        """Read what is left in a pipe. It may never reach its end: other processes can hold it."""
        while True:
            try:
                chunk = os.read(pipe.fileno(), _CHUNK)
            except BlockingIOError:
                return
            if not chunk:
                return
            self.streams[pipe].feed(chunk)
