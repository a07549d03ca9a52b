"""Writes checkpoints in the background, one after the other."""

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

from jaxdist._checkpoints.errors import make_directory_error, make_write_error
from jaxdist._checkpoints.group import Group, find_group
from jaxdist._checkpoints.interrupts import delay_interrupts
from jaxdist._checkpoints.joint_save import JointSave
from jaxdist._checkpoints.parts import start_part
from jaxdist._checkpoints.storage import Storage
from jaxdist._processes import HERE, get_current_process
from jaxdist.errors import BucketError, CheckpointError, OtherProcessError

_LOG = logging.getLogger("jaxdist")


class Writer:
    """Writes the checkpoints of a directory in the background.

    From the first `write` to `close` it holds the lock of the directory.

    Args:
        storage: The checkpoints of the directory.
        keep: How many of the newest checkpoints to keep.
        seconds: How long to wait for other processes; None means `collective_seconds`.
    """

    def __init__(self, storage: Storage, keep: int, seconds: float | None = None) -> None:
        self._storage, self._keep, self._seconds = storage, keep, seconds
        self._directory = storage.directory
        self._joint: JointSave | None = None
        self._has_lock = False
        self._thread: threading.Thread | None = None
        self._failure: tuple[int, Exception] | None = None
        # Threads may save with one object; the checks of a call and its write belong together.
        self.calls = threading.RLock()

    def write(self, step: int, leaves: Mapping[str, Any], notes: Mapping[str, Any]) -> None:
        """Copy the leaves to the host, and start to write them. Call `read_steps` before.

        Raises:
            CheckpointError: Another job writes here, or the write cannot begin.
            OtherProcessError: Another process of the job did not answer, or has ended.
        """
        self.take_lock()
        group = self.find_group()
        joint = None if group is None else self._join_group(group)
        with delay_interrupts():
            complete: Callable[[int], None]
            try:
                if joint is None:
                    complete = self._start_alone(step, leaves, notes)
                else:
                    joint.start(step, leaves, notes)
                    complete = joint.complete
            except BucketError as error:
                raise self._fail(step, error) from error
            except (OtherProcessError, CheckpointError):
                raise
            except Exception as error:
                raise self._fail(step, error) from error
            _wait_at_exit()
            _RUNNING.add(self)
            self._thread = threading.Thread(target=self._complete, args=(complete, step))
            self._thread.start()
        if joint is not None and joint.error is not None:
            # The thread reports the failure to the other processes.
            self.wait()

    def _start_alone(
        self, step: int, leaves: Mapping[str, Any], notes: Mapping[str, Any]
    ) -> Callable[[int], None]:
        # Only with the lock: this deletes partly written checkpoints, which another job might be
        # writing.
        name = self._storage.prepare(step, "alone")
        process = get_current_process()
        finish = start_part(self._storage, name, leaves, notes, process, process.index)

        def complete(step: int) -> None:
            finish()
            self._storage.publish(name, step, self._keep, process.index)

        return complete

    def read_steps(self, method: str, step: int) -> tuple[int, ...]:
        """Wait until no write is in progress, and return the steps of the complete checkpoints.

        All processes of a job get the same steps.

        Args:
            method: The method of `Checkpoints` that the user has called.
            step: The argument of the method, which is the same in all processes.

        Raises:
            CheckpointError: The last checkpoint could not be written, or processes use different
                folders.
            OtherProcessError: Another process of the job did not answer, has ended, or made another
                call.
        """
        self.wait()
        self._wait_for_others()
        group = self.find_group()
        if group is None:
            return self._storage.list_steps()
        return self._join_group(group).agree_on_steps(method, step)

    def delete_after(self, step: int) -> tuple[int, ...]:
        """Delete the checkpoints of later steps, newest first, and return their steps.

        Raises:
            CheckpointError: Another job writes here, or a checkpoint cannot be deleted.
            OtherProcessError: Another process of the job did not answer, or has ended.
        """
        steps = self.read_steps("discard_after", step)
        later = tuple(s for s in steps if s > step)
        if not later:
            return ()
        self.take_lock()
        # Newest first: if the process is killed in between, all checkpoints up to one step remain,
        # and `restore` takes the newest of these.
        newest_first = later[::-1]
        with delay_interrupts():
            try:
                if self._joint is not None:
                    self._joint.delete(newest_first)
                else:
                    for one in newest_first:
                        self._storage.delete(one)
            except BucketError:
                raise
            except OSError as error:
                raise make_directory_error(self._directory, error) from error
        return later

    def _join_group(self, group: Group) -> JointSave:
        self._joint = self._joint or JointSave(group, self._storage, self._keep)
        return self._joint

    def find_group(self) -> Group | None:
        """Return the group of processes that work together; None if this process works alone."""
        return find_group(self._seconds)

    def take_lock(self) -> None:
        """Keep other jobs out of the directory, until `close`."""
        if not self._has_lock:
            self._storage.lock.__enter__()
            self._has_lock = True

    def prepare_alone(self) -> None:
        """Wait until the write in progress has ended or failed, and take the lock."""
        with contextlib.suppress(CheckpointError, OtherProcessError):
            self.wait()
        self.take_lock()

    def _complete(self, complete: Callable[[int], None], step: int) -> None:
        """Wait until a checkpoint is written; store an error, which `wait` raises."""
        try:
            complete(step)
            _RUNNING.discard(self)
        except Exception as error:
            self._failure = step, error

    def is_writing(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the checkpoint is written. Ctrl-C takes effect afterwards.

        Raises:
            CheckpointError: The checkpoint could not be written. The error is raised once.
            OtherProcessError: Another process of the job did not answer, or has ended.
        """
        with delay_interrupts():
            if self._thread is not None:
                self._join(self._thread)
                self._thread = None
            _RUNNING.discard(self)
            if self._failure is not None:
                (step, error), self._failure = self._failure, None
                raise self._fail(step, error) from error

    def _wait_for_others(self) -> None:
        """Wait for other objects of this process that write into the directory.

        They share the lock of the job, and a write deletes the parts of one that seems interrupted.
        """
        for other in list(_RUNNING):
            if other is not self and str(other._directory) == str(self._directory):
                with delay_interrupts():
                    if other._thread is not None:
                        self._join(other._thread)

    def _join(self, thread: threading.Thread) -> None:
        if self._joint is None:
            thread.join()
            return
        # The thread may wait for other processes, and then so does this one.
        HERE.enter("a checkpoint that is being written", in_wait=HERE.blames is None)
        try:
            thread.join()
        finally:
            HERE.leave()

    def _fail(self, step: int, error: Exception) -> CheckpointError | OtherProcessError:
        """Wait until no thread writes, and return our error for an error of Orbax."""
        if isinstance(error, OtherProcessError):
            return error
        # Orbax raises the first error while its other threads still write. They could write into
        # the next checkpoint of the same step.
        for thread in threading.enumerate():
            if type(thread).__module__.startswith("orbax."):
                with contextlib.suppress(Exception):
                    thread.join()
        others: list[int] = []
        with contextlib.suppress(BucketError):
            others = [s for s in self._storage.list_steps() if s != step]
        return make_write_error(self._directory, step, others, error)

    def close(self) -> None:
        """Wait as `wait` does, and release the lock."""
        try:
            self.wait()
        finally:
            self._storage.lock.close()
            self._has_lock = False


# Note [Checkpoints at exit]
# When the main thread ends, Python first makes `concurrent.futures` refuse new work, then joins the
# threads, and then calls the `atexit` functions. Orbax needs `concurrent.futures` to complete a
# checkpoint, so jaxdist must wait before the first of these. `concurrent.futures` registers its
# function with `threading._register_atexit`; functions registered later are called earlier.
_RUNNING: set[Writer] = set()


@functools.cache
def _wait_at_exit() -> None:
    register = vars(threading)["_register_atexit"]
    register(_wait_for_all)


def _wait_for_all() -> None:
    for writer in list(_RUNNING):
        try:
            writer.wait()
        except (CheckpointError, OtherProcessError) as error:
            _LOG.error("%s", error)
