"""Describes how a process ended, and passes this between launcher and processes."""

import dataclasses
import json
import os
import pathlib
import signal

from jaxdist.errors import OtherProcessError


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
    content = {"is_about_others": about, "processes": processes, "text": str(error)}
    write_whole(pathlib.Path(folder) / f"{index}.error", json.dumps(content))


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
