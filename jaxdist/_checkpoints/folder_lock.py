"""A lock that allows one job in a folder. It ends with the last process of the job."""

import contextlib
import datetime
import json
import logging
import os
import socket
import uuid
import weakref
from pathlib import Path
from types import ModuleType
from typing import IO, Any, Self

from jaxdist._buckets import shorten_place
from jaxdist._processes import get_process_of_job, get_store
from jaxdist.errors import CheckpointError

_LOG = logging.getLogger("jaxdist")
LOCK_NAME = ".jaxdist-job.lock"
_GUARD = ".jaxdist-job.guard"
JOB_ID = "JAXDIST_JOB_ID"
_JOB_KEY = "jaxdist/job"
_PROCESS_JOB_ID = uuid.uuid4().hex


def get_job_id() -> str:
    """Return the id of the job of this process: `JAXDIST_JOB_ID`, or an id that jaxdist makes.

    Processes that have joined each other have one id.

    Example:
        >>> get_job_id() == get_job_id()
        True
    """
    return os.environ.get(JOB_ID) or _find_shared_id() or _PROCESS_JOB_ID


def _find_shared_id() -> str | None:
    store, process = get_store(), get_process_of_job()
    if store is None or process is None or process.count == 1:
        return None
    with contextlib.suppress(KeyError):
        # The first process to set the key decides.
        store.set(_JOB_KEY, _PROCESS_JOB_ID)
    return store.get(_JOB_KEY)


# Note [The lock of a job]
# Each process of a job holds a shared `flock` on one file. The file contains the id of the job. The
# kernel releases the lock when the process ends, even after SIGKILL.
# A process that gets the lock exclusively knows that no job uses the folder. It writes its id and
# converts the lock to a shared one. `flock` releases a lock for a moment when it converts it, and
# another job could take the lock then. So all of this happens under a second, exclusive lock, the
# guard, which is released right afterwards.


class JobLock:
    """A context manager that keeps other jobs out of a folder.

    The processes of one job, with the same `JAXDIST_JOB_ID` in their environment, share the lock.
    One process can take it several times. A killed process leaves no lock behind. If files cannot
    be locked (some network file systems, Windows), jaxdist logs a warning and keeps no job out.
    See Note [The lock of a job].

    Args:
        folder: The folder. It is created if it does not exist.

    Raises:
        CheckpointError: Another job uses the folder. The error names its process, machine and
            start.

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
        lock_file = _open_file(self.folder / LOCK_NAME)
        try:
            with _open_file(self.folder / _GUARD) as guard:
                fcntl.flock(guard, fcntl.LOCK_EX)
                self._take(fcntl, lock_file)
        except CheckpointError:
            lock_file.close()
            raise
        except OSError as error:
            # A file system without locks. Training without a lock is better than an error.
            lock_file.close()
            _LOG.warning("%s is not locked: %s.", self.folder, error)
            return self
        self._file = lock_file
        _HELD_LOCKS.add(self)
        return self

    def _take(self, fcntl: ModuleType, lock_file: IO[str]) -> None:
        owner: dict[str, Any] = {}
        # Two attempts: the other job may end after the lock was refused and before its id is read.
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
            raise make_in_use_error(shorten_place(self.folder), owner)
        fcntl.flock(lock_file, fcntl.LOCK_SH)

    def close(self) -> None:
        """Release the lock, if it is held."""
        if self._file is not None:
            self._file.close()
            self._file = None
            _HELD_LOCKS.discard(self)

    def __exit__(self, *_: object) -> None:
        self.close()


def _import_fcntl() -> ModuleType | None:
    try:
        import fcntl
    except ImportError:
        return None
    return fcntl


def _open_file(path: Path) -> IO[str]:
    # Not `open(path, "w")`, which would truncate the id that another process wrote.
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+")


def describe_job() -> dict[str, Any]:
    """Return the id of the job and what an error says about this process."""
    return {
        "job": get_job_id(),
        "process": os.getpid(),
        "machine": socket.gethostname(),
        "since": datetime.datetime.now().isoformat(" ", "seconds"),
    }


def _write(lock_file: IO[str]) -> None:
    lock_file.seek(0)
    lock_file.truncate()
    lock_file.write(json.dumps(describe_job()) + "\n")
    lock_file.flush()


def _read(lock_file: IO[str]) -> dict[str, Any]:
    lock_file.seek(0)
    try:
        found = json.loads(lock_file.read())
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def name_owner(owner: dict[str, Any]) -> str:
    """Return the words for the process that `describe_job` described."""
    if {"process", "machine", "since"} <= owner.keys():
        return f"process {owner['process']} on {owner['machine']}, since {owner['since']}"
    return "an unknown process"


def make_in_use_error(folder: str, owner: dict[str, Any]) -> CheckpointError:
    """Return the error for a folder that another job uses."""
    return CheckpointError(
        f"Another job uses {folder!r}: {name_owner(owner)}.\n\n"
        "A folder is for one job at a time.\n\n"
        "Wait until it ends, or end it, or use other folders: checkpoint.directory and "
        "output.directory of `jaxdist train`. Processes of one job that share a folder are "
        f"started with the same {JOB_ID} in their environment."
    )


_HELD_LOCKS: "weakref.WeakSet[JobLock]" = weakref.WeakSet()


def _release_in_child() -> None:
    """Close the locks in a forked child."""
    # A child shares the open file of its parent, and would keep the lock if it outlives the parent.
    for lock in list(_HELD_LOCKS):
        with contextlib.suppress(OSError):
            lock.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_in_child)
