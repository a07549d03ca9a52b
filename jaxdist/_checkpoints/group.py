"""`Group`: the processes that share the checkpoints of a folder, and what they agree on."""

import contextlib
import json
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from jaxdist._buckets import Place
from jaxdist._processes import HERE, Agreement, exchange_over, get_agreement
from jaxdist.errors import CheckpointError, ContextError, DamagedCheckpointError, UnavailableError

_MAIN = "checkpoints"


class Group:
    """All processes of the job, which make the same calls of `Checkpoints` in the same order.

    Args:
        agreement: How the processes exchange strings.
        seconds: How long a process waits for the others; None means `collective_seconds`.
    """

    def __init__(self, agreement: Agreement, seconds: float | None = None) -> None:
        self._agreement = agreement
        self.process = agreement.process
        self._seconds = seconds

    def only_first(self, act: Callable[[], None]) -> Callable[[], None]:
        """Return `act` in the first process, and a function that does nothing in the others."""
        return act if self.process.is_first else lambda: None

    def gather(self, call: str, said: Any) -> list[Any]:
        """Return the messages of all processes, in order. Only the main thread may call it.

        Args:
            call: The call of the user, for errors.
            said: The message of this process, which JSON can hold.

        Raises:
            DeadlineExceededError: A process did not answer in time.
            UnavailableError: A process has ended.
        """
        HERE.enter(call, in_wait=True)
        try:
            return self._gather(_MAIN, call, said, bool)
        finally:
            HERE.leave()

    def gather_in_background(self, channel: str, call: str, said: Any) -> list[Any]:
        """Return the messages of all processes, for a thread that has its own channel.

        Raises:
            DeadlineExceededError: A process did not answer in time.
            UnavailableError: A process has ended, or an error in the main thread reports this.
        """
        try:
            return self._gather(channel, call, said, lambda: HERE.blames is not None)
        except ContextError:
            # Only the error of a collective shows that a process of another machine has ended.
            processes = HERE.blames or ()
            names = " and ".join(f"process {i}" for i in processes) or "another process"
            raise UnavailableError(
                f"{call}: {names} did not answer, and this process has stopped waiting for "
                "the others.\n\nA checkpoint is complete when all processes have written it.\n\n"
                "Start the job again.",
                processes,
            ) from None

    def _gather(
        self, channel: str, call: str, said: Any, is_stopped: Callable[[], bool]
    ) -> list[Any]:
        text = json.dumps(said)
        texts = exchange_over(self._agreement, call, channel, text, self._seconds, call, is_stopped)
        return [json.loads(text) for text in texts]


def find_group(seconds: float | None) -> Group | None:
    """Return the group of processes of the job; None if this process works alone."""
    agreement = get_agreement()
    if agreement is None or agreement.process.count == 1:
        return None
    return Group(agreement, seconds)


# Network file systems may show a new file with a delay.
_PATIENCE_SECONDS = 5.0
_NAP = 0.05


def check_same_folder(group: Group, call: str, folder: Place) -> str:
    """Check that all processes see one folder, and return a string that is equal in all of them.

    Cost:
        Two exchanges of short strings; process 0 writes a short file and deletes it.

    Raises:
        CheckpointError: A process has another folder.
    """
    name = f".jaxdist-shared-{uuid.uuid4().hex}"
    here = {"host": socket.gethostname(), "folder": str(folder), "name": name, "error": ""}
    if group.process.is_first:
        try:
            (folder / name).write_bytes(b"1")
        except OSError as error:
            here["error"] = f"{type(error).__name__}: {error}"
    try:
        everyone = group.gather(call, here)
        first = everyone[0]
        sees = not first["error"] and _is_there(folder / first["name"])
        answers = group.gather(call, sees)
    finally:
        if group.process.is_first:
            with contextlib.suppress(OSError):
                (folder / name).unlink()
    if first["error"]:
        raise CheckpointError(
            f"{call}: process 0 cannot write to {first['folder']!r} on {first['host']}: "
            f"{first['error']}.\n\n"
            "All processes write into the folder of the checkpoints.\n\n"
            "Change its permissions, or choose another directory."
        )
    blind = [i for i, answer in enumerate(answers) if not answer]
    if blind:
        other = everyone[blind[0]]
        raise CheckpointError(
            f"{call}: process {blind[0]} on {other['host']} does not find in {other['folder']!r} "
            f"what process 0 has written to {first['folder']!r} on {first['host']}.\n\n"
            "Each process writes its own shards of a checkpoint, and all of them into one "
            "folder.\n\n"
            "Pass a folder that all hosts share (NFS, Lustre, gs://..., s3://...), the same one in "
            "every process, instead of a local disk."
        )
    return str(first["name"])


def _is_there(path: Place) -> bool:
    end = time.monotonic() + _PATIENCE_SECONDS
    while not path.exists():
        if time.monotonic() >= end:
            return False
        time.sleep(_NAP)
    return True


T = TypeVar("T")


def agree_on_result(group: Group, call: str, act: Callable[[], T]) -> T:
    """Return the result of `act`, or raise an error if `act` raised in any process.

    Raises:
        DamagedCheckpointError: `act` raised this error in another process.
        CheckpointError: `act` raised another error in another process.
    """
    results: list[T] = []
    own: Exception | None = None
    try:
        results.append(act())
    except Exception as error:
        own = error
    kind = "" if own is None else "damaged" if isinstance(own, DamagedCheckpointError) else "other"
    answers = group.gather(call, [kind, "" if own is None else f"{type(own).__name__}: {own}"])
    if own is not None:
        raise own
    failed = [i for i, (kind, _) in enumerate(answers) if kind]
    if not failed:
        return results[0]
    kind, text = answers[failed[0]]
    made = DamagedCheckpointError if kind == "damaged" else CheckpointError
    raise made(
        f"{call}: process {failed[0]} has failed, and this process has not.\n\n"
        "All processes do this together, or none does it.\n\n"
        f"That process reports:\n{text}"
    )


def check_same_steps(group: Group, call: str, directory: Place, steps: Sequence[int]) -> None:
    """Check that all processes see the same checkpoints.

    Raises:
        CheckpointError: Processes see different checkpoints, so their folders differ.
    """
    said = {"host": socket.gethostname(), "folder": str(directory), "steps": list(steps)}
    everyone = group.gather(call, said)
    first = everyone[0]
    other = [i for i, one in enumerate(everyone) if one["steps"] != first["steps"]]
    if other:
        found = everyone[other[0]]
        raise CheckpointError(
            f"{call}: process {other[0]} on {found['host']} sees the checkpoints "
            f"{found['steps']} in {found['folder']!r}, and process 0 on {first['host']} "
            f"{first['steps']} in {first['folder']!r}.\n\n"
            "All processes restore one checkpoint from one folder.\n\n"
            "Pass a folder that all hosts share (NFS, Lustre, gs://..., s3://...), the same one in "
            "every process, instead of a local disk."
        )
