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
_PROCESS_JOB_ID = uuid.uuid4().hex


def get_job_id() -> str:
    """The job that this process belongs to: `JAXDIST_JOB_ID`, or one of its own.

    Example:
        >>> get_job_id() == get_job_id()
        True
    """
    return os.environ.get(JOB_ID) or _PROCESS_JOB_ID


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
        self._file: IO[str] | None = None

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        fcntl = _import_fcntl()
        if fcntl is None:
            _LOG.warning("%s is not locked: this system has no flock.", self.folder)
            return self
        lock_file = _open_file(self.folder / _NAME)
        try:
            with _open_file(self.folder / _GUARD) as guard:
                fcntl.flock(guard, fcntl.LOCK_EX)
                self._take(fcntl, lock_file)
        except CheckpointError:
            lock_file.close()
            raise
        except OSError as error:
            lock_file.close()
            _LOG.warning("%s is not locked: %s.", self.folder, error)
            return self
        self._file = lock_file
        _HELD_LOCKS.add(self)
        return self

    def _take(self, fcntl: ModuleType, lock_file: IO[str]) -> None:
        owner: dict[str, Any] = {}
        # Twice, since the other job may end between a try and a look at its name.
        for _ in range(2):
            try:
                fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = _read(lock_file)
                if owner.get("job") == get_job_id():
                    break
            else:
                _write(lock_file)
                break
        else:
            raise _make_in_use_error(self.folder, owner)
        fcntl.flock(lock_file, fcntl.LOCK_SH)

    def close(self) -> None:
        """Let go; nothing happens where nothing is held."""
        if self._file is not None:
            self._file.close()
            self._file = None
            _HELD_LOCKS.discard(self)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _import_fcntl() -> ModuleType | None:
    try:
        import fcntl
    except ImportError:
        return None
    return fcntl


def _open_file(path: Path) -> IO[str]:
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+")


def _write(lock_file: IO[str]) -> None:
    about = {
        "job": get_job_id(),
        "process": os.getpid(),
        "machine": socket.gethostname(),
        "since": datetime.datetime.now().isoformat(" ", "seconds"),
    }
    lock_file.seek(0)
    lock_file.truncate()
    lock_file.write(json.dumps(about) + "\n")
    lock_file.flush()


def _read(lock_file: IO[str]) -> dict[str, Any]:
    lock_file.seek(0)
    try:
        found = json.loads(lock_file.read())
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _make_in_use_error(folder: Path, owner: dict[str, Any]) -> CheckpointError:
    who = (
        f"process {owner['process']} on {owner['machine']}, since {owner['since']}"
        if {"process", "machine", "since"} <= owner.keys()
        else "a process that did not say which"
    )
    return CheckpointError(
        f"Another job is in {str(folder)!r}: {who}.\n\n"
        "A folder is for one job at a time.\n\n"
        "Wait until it ends, or end it, or use other folders: checkpoint.directory and "
        "output.directory of `jaxdist train`. Processes of one job that share a folder are "
        f"started with the same {JOB_ID} in their environment."
    )


_HELD_LOCKS: "weakref.WeakSet[JobLock]" = weakref.WeakSet()


def _release_in_child() -> None:
    """A forked child holds no lock of its parent, which would outlive it."""
    for lock in list(_HELD_LOCKS):
        with contextlib.suppress(OSError):
            lock.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_in_child)
