"""A lock that allows one job in a folder of a bucket, by conditions on one object."""

import atexit
import json
import logging
import math
import os
import threading
import time
import uuid
from typing import Any, Self

from jaxdist._buckets import BucketPath
from jaxdist._checkpoints.folder_lock import (
    LOCK_NAME,
    describe_job,
    get_job_id,
    make_in_use_error,
    name_owner,
)
from jaxdist._processes import get_current_process
from jaxdist.errors import BucketError

_LOG = logging.getLogger("jaxdist")

# Note [The lock of a job in a bucket]
# A bucket has no lock that ends with a process. So the lock is an object with the id of the job,
# and the time until which it is held. The first process of the job renews it. Each write has the
# condition that the object is as it was read, so of two jobs that write at once, one is refused.
# A job that meets the lock of another one watches it. If it is renewed, the other job is alive, and
# the lock is refused. If it is not renewed for as long as it is held, the other job has ended.
# Clocks of machines differ, so the time in the object counts only if it is long past.
# A job that stands still for longer than that loses the lock. It looks at it again before a
# checkpoint counts.

_HELD_SECONDS = 60.0
_RENEWED_SECONDS = 15.0
_LOOK_SECONDS = 1.0


class BucketLock:
    """A context manager that keeps other jobs out of a folder of a bucket.

    The processes of one job share the lock, and one process can take it several times. A job that
    was killed leaves it behind; the next one waits until it is not renewed for a minute.
    See Note [The lock of a job in a bucket].

    Args:
        folder: The folder.

    Raises:
        CheckpointError: Another job uses the folder. The error names its process, machine and
            start.
        BucketError: The bucket cannot be read or written.
    """

    def __init__(self, folder: BucketPath) -> None:
        self.folder = folder
        self._file = folder / LOCK_NAME
        self._job, self._process = "", 0
        self._end: threading.Event | None = None  # ends the thread that renews the lock
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._job, self._process = get_job_id(), os.getpid()
        self._take()
        self._end = threading.Event()
        # Before the thread starts, so that no `close` of another lock releases this one.
        with _HELD_CHANGES:
            _HELD[self.folder] = _HELD.get(self.folder, 0) + 1
        if get_current_process().is_first:
            args = self._file, self._job, self._end
            self._thread = threading.Thread(
                target=_renew, args=args, name="jaxdist-lock", daemon=True
            )
            self._thread.start()
        atexit.register(self.close)
        return self

    def _take(self) -> None:
        """Wait until this job has the lock; raise an error if another job is alive."""
        owner, seen, watched = None, b"", 0.0
        while True:
            found = self._file.read_version()
            if found is None:
                if self._file.create(_describe(self._job, _HELD_SECONDS)):
                    return
                continue
            content, version = _parse(found[0]), found[1]
            if content["until"] + 2 * _HELD_SECONDS < time.time():
                if self._file.replace(_describe(self._job, _HELD_SECONDS), version):
                    return
            elif content["job"] == self._job:
                return
            elif owner == content["job"] and version != seen:
                raise make_in_use_error(str(self.folder), content)
            elif version != seen:
                owner, seen, watched = content["job"], version, time.monotonic()
                _LOG.warning(
                    "%s is locked by %s. Waiting up to %.0f s to see whether that job has ended.",
                    self.folder,
                    name_owner(content),
                    _HELD_SECONDS,
                )
            elif time.monotonic() - watched > _HELD_SECONDS and self._file.replace(
                _describe(self._job, _HELD_SECONDS), version
            ):
                return
            time.sleep(_LOOK_SECONDS)

    @property
    def is_held(self) -> bool:
        """Whether the lock was taken and not closed."""
        return self._end is not None

    def check(self) -> None:
        """Check that no other job has taken the lock.

        Raises:
            CheckpointError: Another job has taken it, after this process stood still.
            BucketError: The bucket cannot be read.
        """
        content = _parse(self._file.read_bytes())
        if content["job"] != self._job:
            raise make_in_use_error(str(self.folder), content)

    def close(self) -> None:
        """Release the lock, if it is held."""
        # A child that was forked does not hold the lock of its parent.
        if self._end is None or self._process != os.getpid():
            return
        self._end.set()
        self._end = None
        if self._thread is not None:
            # A thread that is in a request when Python ends would end the process with a signal.
            self._thread.join()
        atexit.unregister(self.close)
        with _HELD_CHANGES:
            _HELD[self.folder] -= 1
            is_last = not _HELD[self.folder]
            if is_last:
                del _HELD[self.folder]
        if is_last and get_current_process().is_first:
            try:
                self._release()
            except BucketError as error:
                _LOG.warning("The lock of %s was not released: %s", self.folder, error)

    def _release(self) -> None:
        found = self._file.read_version()
        if found is not None and _parse(found[0])["job"] == self._job:
            # Not deleted, since not every store deletes under a condition.
            self._file.replace(_describe(self._job, None), found[1])

    def __exit__(self, *_: object) -> None:
        self.close()


# How many locks of this process are held, by folder.
_HELD: dict[BucketPath, int] = {}
_HELD_CHANGES = threading.Lock()


def _renew(file: BucketPath, job: str, end: threading.Event) -> None:
    """Renew the lock until `end` is set, or another job has taken it."""
    while not end.wait(_RENEWED_SECONDS):
        try:
            found = file.read_version()
            if found is None or _parse(found[0])["job"] != job:
                _LOG.error("Another job has taken the lock %s.", file)
                return
            if not end.is_set():
                file.replace(_describe(job, _HELD_SECONDS), found[1])
        except BucketError as error:
            _LOG.warning("The lock %s was not renewed: %s", file, error)


def _describe(job: str, seconds: float | None) -> bytes:
    """Return the content of a lock that is held for so many seconds from now, or released."""
    until = 0.0 if seconds is None else time.time() + seconds
    # The mark makes each version another one, where a store names versions by their content.
    return json.dumps(
        {**describe_job(), "job": job, "until": until, "mark": uuid.uuid4().hex}
    ).encode()


def _parse(content: bytes) -> dict[str, Any]:
    try:
        found = json.loads(content)
        return {**found, "job": str(found["job"]), "until": float(found["until"])}
    except (ValueError, LookupError, TypeError):
        # Somebody else's file: watched as the lock of an unknown job.
        return {"job": "", "until": math.inf}
