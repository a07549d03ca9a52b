"""`JointSave`, which writes checkpoints together with all processes of a job."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxdist._checkpoints.errors import ElsewhereError
from jaxdist._checkpoints.group import Group, agree_on_result, check_same_folder
from jaxdist._checkpoints.parts import start_part
from jaxdist._checkpoints.storage import Storage
from jaxdist.errors import OtherProcessError, ProgramMismatchError

# Note [Checkpoints of several processes]
# Process 0 makes a folder with a temporary name. Each process writes its own shards and their
# checksums into it, and reports that it has. When all have reported, process 0 writes the rest and
# renames the folder. So a checkpoint that counts has the shards of all processes.
# The processes exchange short strings over the key-value store, and never use a collective: they
# wait in a thread, and collectives of two threads would have no common order. Orbax's own barriers
# are not used, because they are collectives, or wait 300 s for a process that has ended.


class JointSave:
    """Writes the checkpoints of one folder together with the other processes.

    Args:
        group: The processes.
        storage: The checkpoints of the folder.
        keep: How many of the newest checkpoints to keep.
    """

    def __init__(self, group: Group, storage: Storage, keep: int) -> None:
        self._group, self._storage, self._keep = group, storage, keep
        self._channel = ""
        self._lost: OtherProcessError | None = None
        self._call = ""
        self._name = ""  # the folder of the checkpoint that is being written
        self._complete: Callable[[], None] | None = None
        # Why this process could not start to write the last checkpoint.
        self.error: Exception | None = None

    def agree_on_steps(self, method: str, step: int) -> tuple[int, ...]:
        """Return the steps of the complete checkpoints, as process 0 sees them.

        All processes use this list, since a shared file system may show changes to some of them
        later.

        Args:
            method: The method that all processes call.
            step: The argument of the method.

        Raises:
            CheckpointError: The processes do not share the folder.
            ProgramMismatchError: The processes call different methods, or pass different steps.
            DeadlineExceededError: A process did not answer in time.
            UnavailableError: A process has ended.
        """
        self._call = f"Checkpoints.{method}(step={step})"
        with self._keep_loss():
            if not self._channel:
                self._channel = check_same_folder(self._group, self._call, self._storage.directory)
            steps = self._storage.list_steps() if self._group.process.is_first else ()
            said = {"call": [method, step], "steps": steps}
            everyone = self._group.gather(self._call, said)
            first = everyone[0]
            calls = [tuple(one["call"]) for one in everyone]
            other = [i for i, call in enumerate(calls) if call != calls[0]]
            if other:
                raise _make_mismatch_error(calls, other)
            return tuple(first["steps"])

    @contextlib.contextmanager
    def _keep_loss(self) -> Iterator[None]:
        if self._lost is not None:
            # After a loss, this process no longer knows which exchange the others are in.
            raise self._lost
        try:
            yield
        except OtherProcessError as error:
            self._lost = error
            raise

    def delete(self, steps: Sequence[int]) -> None:
        """Delete checkpoints in the given order, in process 0.

        Raises:
            CheckpointError: Process 0 could not delete a checkpoint.
            DeadlineExceededError: A process did not answer in time.
            UnavailableError: A process has ended.
        """

        def act() -> None:
            for step in steps:
                self._storage.delete(step)

        with self._keep_loss():
            agree_on_result(self._group, self._call, self._group.only_first(act))

    def start(self, step: int, leaves: Mapping[str, Any], notes: Mapping[str, Any]) -> None:
        """Copy the shards of this process to the host, and start to write them.

        Call `agree_on_steps` before, and `complete` afterwards, in a thread.

        Raises:
            ElsewhereError: Process 0 cannot write to the folder.
            DeadlineExceededError: A process did not answer in time.
            UnavailableError: A process has ended.
        """
        with self._keep_loss():
            self._agree_on_folder(step)
        self._complete, self.error = None, None
        try:
            self._complete = start_part(
                self._storage, self._name, leaves, notes, self._group.process, 0
            )
        except Exception as error:
            # The others wait for this process, so `complete` tells them.
            self.error = error

    def _agree_on_folder(self, step: int) -> None:
        said = {"folder": "", "error": ""}
        if self._group.process.is_first:
            try:
                said["folder"] = self._storage.prepare(step, self._channel[-8:])
            except OSError as error:
                said["error"] = f"{type(error).__name__}: {error}"
        first = self._group.gather(self._call, said)[0]
        if first["error"]:
            raise ElsewhereError(f"process 0 cannot create the folder: {first['error']}")
        self._name = first["folder"]

    def complete(self, step: int) -> None:
        """Wait until all processes have written the checkpoint, and publish it.

        Raises:
            ElsewhereError: Another process could not write its part.
            DeadlineExceededError: A process did not answer in time.
            UnavailableError: A process has ended.
        """
        with self._keep_loss():
            self._exchange(self._write_part)
            act = functools.partial(self._storage.publish, self._name, step, self._keep, 0)
            self._exchange(self._group.only_first(act))

    def _write_part(self) -> None:
        if self._complete is None:
            raise self.error or RuntimeError("start was not called")
        self._complete()

    def _exchange(self, act: Callable[[], None]) -> None:
        """Run a function, and raise an error in all processes if it failed in one."""
        own: Exception | None = None
        try:
            act()
        except Exception as error:
            own = error
        text = "" if own is None else f"{type(own).__name__}: {own}"
        answers = self._group.gather_in_background(self._channel, self._call, text)
        if own is not None:
            raise own
        failed = [i for i, answer in enumerate(answers) if answer]
        if failed:
            raise ElsewhereError(f"process {failed[0]} failed with {answers[failed[0]]}")


_DOES = {"save": "saves step {}", "discard_after": "deletes the checkpoints after step {}"}


def _make_mismatch_error(
    calls: Sequence[tuple[str, int]], other: Sequence[int]
) -> ProgramMismatchError:
    first, odd = (_DOES[method].format(step) for method, step in (calls[0], calls[other[0]]))
    method = calls[other[0]][0]
    return ProgramMismatchError(
        f"Checkpoints.{method}: process {other[0]} {odd}, and the first process {first}.\n\n"
        "All processes save the same steps, in the same order.\n\n"
        f"Call {method} in every process, with the step that all of them have completed.",
        other,
    )
