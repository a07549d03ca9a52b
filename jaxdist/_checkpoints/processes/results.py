"""Runs calls that succeed in all processes, or raise in all of them."""

import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from jaxdist._checkpoints.processes.group import Group
from jaxdist.errors import CheckpointError, DamagedCheckpointError

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
        "Checkpoints are restored, and deleted, by all processes or by none.\n\n"
        f"That process says:\n{text}"
    )


def check_same_steps(group: Group, call: str, directory: Path, steps: Sequence[int]) -> None:
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
            "Pass a folder that all hosts share (NFS, Lustre, a mounted bucket), the same one in "
            "every process, instead of a local disk."
        )
