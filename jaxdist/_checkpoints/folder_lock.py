"""One job in one folder: a lock that belongs to a job, and ends with the last of its processes."""

import contextlib
import datetime
import json
import logging
import os
import socket
import uuid
import weakref
from pathlib import Path
from types import ModuleType, TracebackType
from typing import IO, Any, Self

from jaxdist.errors import CheckpointError

_LOG = logging.getLogger("jaxdist")
_NAME = ".jaxdist-job.lock"
_GUARD = ".jaxdist-job.guard"
JOB_ID = "JAXDIST_JOB_ID"
_OF_THIS_PROCESS = uuid.uuid4().hex


def job_id() -> str:
    """The job that this process belongs to: `JAXDIST_JOB_ID`, or one of its own.

    Example:
        >>> job_id() == job_id()
        True
    """
    return os.environ.get(JOB_ID) or _OF_THIS_PROCESS


# [Note: the lock of a job]
# Each process of a job holds a shared `flock` on one file, in which the id of the job is written;
# the kernel lets go of it when the process ends, however it ends. Whoever gets it exclusively knows
# that no job is there, writes its id, and shares it. Turning one lock into the other lets go for a
# moment, so all of that is done under a second, exclusive lock. It is held for that long only.


class JobLock:
    """Keeps other jobs out of a folder; a context manager.

    Processes of one job share it: those with the same `JAXDIST_JOB_ID` in their environment, and
    one process with itself. A process that is killed leaves no lock behind. Where files cannot be
    locked (some network file systems, Windows), a warning is logged, and nobody is kept out.

    Args:
        folder: Made where it does not exist.

    Raises:
        CheckpointError: Another job is in the folder; its process, machine and start are named.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> with JobLock(folder), JobLock(folder):
        ...     print("once more in the same job")
        once more in the same job
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._held: IO[str] | None = None

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        fcntl = _fcntl()
        if fcntl is None:
            _LOG.warning("%s is not locked: this system has no flock.", self.folder)
            return self
        held = _opened(self.folder / _NAME)
        try:
            with _opened(self.folder / _GUARD) as guard:
                fcntl.flock(guard, fcntl.LOCK_EX)
                self._take(fcntl, held)
        except CheckpointError:
            held.close()
            raise
        except OSError as error:
            held.close()
            _LOG.warning("%s is not locked: %s.", self.folder, error)
            return self
        self._held = held
        _HELD.add(self)
        return self

    def _take(self, fcntl: ModuleType, held: IO[str]) -> None:
        there: dict[str, Any] = {}
        # Twice, since the other job may end between a try and a look at its name.
        for _ in range(2):
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                there = _read(held)
                if there.get("job") == job_id():
                    break
            else:
                _write(held)
                break
        else:
            raise _in_use(self.folder, there)
        fcntl.flock(held, fcntl.LOCK_SH)

    def close(self) -> None:
        """Let go; nothing happens where nothing is held."""
        if self._held is not None:
            self._held.close()
            self._held = None
            _HELD.discard(self)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _fcntl() -> ModuleType | None:
    try:
        import fcntl
    except ImportError:
        return None
    return fcntl


def _opened(path: Path) -> IO[str]:
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+")


def _write(held: IO[str]) -> None:
    about = {
        "job": job_id(),
        "process": os.getpid(),
        "machine": socket.gethostname(),
        "since": datetime.datetime.now().isoformat(" ", "seconds"),
    }
    held.seek(0)
    held.truncate()
    held.write(json.dumps(about) + "\n")
    held.flush()


def _read(held: IO[str]) -> dict[str, Any]:
    held.seek(0)
    try:
        found = json.loads(held.read())
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _in_use(folder: Path, there: dict[str, Any]) -> CheckpointError:
    who = (
        f"process {there['process']} on {there['machine']}, since {there['since']}"
        if {"process", "machine", "since"} <= there.keys()
        else "a process that did not say which"
    )
    return CheckpointError(
        f"Another job is in {str(folder)!r}: {who}.\n\n"
        "A folder is for one job at a time.\n\n"
        "Wait until it ends, or end it, or use other folders: checkpoint.directory and "
        "output.directory of `jaxdist train`. Processes of one job that share a folder are "
        f"started with the same {JOB_ID} in their environment."
    )


_HELD: "weakref.WeakSet[JobLock]" = weakref.WeakSet()


def _leave_to_the_parent() -> None:
    """A forked child holds no lock of its parent, which would outlive it."""
    for lock in list(_HELD):
        with contextlib.suppress(OSError):
            lock.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_the_parent)
