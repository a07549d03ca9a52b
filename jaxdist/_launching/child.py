"""`Child`: one process of a job, seen from the launcher."""

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from jaxdist._launching.output import PrefixedOutput
from jaxdist.errors import LaunchError, OtherProcessError


@dataclasses.dataclass(frozen=True)
class End:
    """The end of one process.

    Attributes:
        index: Number of the process.
        code: Exit code; -N after the signal N.
        was_ended: Whether the launcher ended it because of another process.
        tail: The end of what it wrote to its standard error.
        record: The error that the process itself recorded by `record_error`.
        lost_with: What ended it, such as "the end of its Ray actor"; empty if it ended by itself.
    """

    index: int
    code: int
    was_ended: bool = False
    tail: str = ""
    record: "Record | None" = None
    lost_with: str = ""

    @property
    def exit_code(self) -> int:
        """The code that a shell would report: 128 + N after the signal N."""
        return self.code if self.code >= 0 else 128 - self.code

    def describe(self) -> str:
        """Return the end as `UnavailableError` shows it: "code 3" or "signal SIGKILL"."""
        if self.lost_with:
            return self.lost_with
        return f"code {self.code}" if self.code >= 0 else f"signal {name_signal(-self.code)}"


def name_signal(number: int) -> str:
    """Return the name of a signal, such as SIGKILL."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


@dataclasses.dataclass(frozen=True)
class Record:
    """The error that ended a process, as the process itself recorded it.

    Attributes:
        is_about_others: Whether it is an `OtherProcessError`: another process is the cause.
        processes: Numbers of the processes that caused it.
        text: Its message.
    """

    is_about_others: bool
    processes: tuple[int, ...]
    text: str


# Note [Files between launcher and processes]
# JAXDIST_LAUNCHER is the path of a directory that only this user can read, new for each attempt.
# The launcher writes `<index>.ended` when a process has ended: "code 3" or "signal SIGKILL", so
# that the others can report it. A process writes `<index>.error` if its command prints an error
# without a traceback. A reader sees each file complete or not at all. JAX's key-value store is not
# used, because it needs a client, and each client is a process of the job.


def write_end(folder: pathlib.Path, end: End) -> None:
    """Write how a process ended, for the processes that still run."""
    write_whole(folder / f"{end.index}.ended", end.describe())


def record_error(error: Exception) -> None:
    """Record for the launcher, if any, the error that ends this process without a traceback."""
    folder, config = os.environ.get("JAXDIST_LAUNCHER"), os.environ.get("TF_CONFIG")
    if folder is None or config is None or not pathlib.Path(folder).is_dir():
        return
    index = int(json.loads(config)["task"]["index"])
    about = isinstance(error, OtherProcessError)
    processes = error.processes if isinstance(error, OtherProcessError) else ()
    record = dataclasses.asdict(Record(about, tuple(processes), str(error)))
    write_whole(pathlib.Path(folder) / f"{index}.error", json.dumps(record))


def read_record(folder: pathlib.Path, index: int) -> Record | None:
    """Return the error that a process recorded by `record_error`, or None."""
    path = folder / f"{index}.error"
    if not path.exists():
        return None
    content = json.loads(path.read_text())
    return Record(content["is_about_others"], tuple(content["processes"]), content["text"])


def write_whole(path: pathlib.Path, text: str) -> None:
    """Write a file so that a reader sees either all of it or the file as it was before."""
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.rename(path)


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
        folder: See Note [Files between launcher and processes].
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
        folder: pathlib.Path,
        name: str | None = None,
    ) -> None:
        self.index = index
        self.end: End | None = None
        self._was_ended = False
        self._folder = folder
        # -I and -S: the first program needs no packages of the user, and starts faster.
        first = [sys.executable, "-I", "-S", str(_BOOTSTRAP), str(os.getpid())]
        try:
            self._process = subprocess.Popen(
                [*first, *command],
                env={**environment, "JAXDIST_LAUNCHER": str(folder)},
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
        self.streams: dict[IO[bytes], PrefixedOutput | None] = {}
        for pipe, output in zip(pipes, outputs, strict=True):
            if pipe is not None:  # Always: both are PIPE.
                os.set_blocking(pipe.fileno(), False)
                self.streams[pipe] = output
        # This one becomes readable when the process ends.
        if hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):
                self.streams[os.fdopen(os.pidfd_open(self.pid), "rb", buffering=0)] = None

    def read(self, pipe: IO[bytes]) -> bool:
        """Write what a pipe holds; return False at its end."""
        output = self.streams[pipe]
        if output is None:
            return False
        try:
            chunk = os.read(pipe.fileno(), _CHUNK)
        except BlockingIOError:
            return True
        output.feed(chunk)
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

    def collect(self) -> End | None:
        """Return how the process ended, once it has, and write the rest of its output."""
        if self.end is not None or not self._has_ended():
            return self.end
        # Before `wait`, after which the system may reuse the number of the group.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        for pipe, output in self.streams.items():
            if output is not None:
                _drain(pipe, output)
                output.finish()
            pipe.close()
        code = self._process.wait()
        record = read_record(self._folder, self.index)
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


def _drain(pipe: IO[bytes], output: PrefixedOutput) -> None:
    """Read what is left in a pipe. It may never reach its end: other processes can hold it."""
    with contextlib.suppress(BlockingIOError):
        while chunk := os.read(pipe.fileno(), _CHUNK):
            output.feed(chunk)
