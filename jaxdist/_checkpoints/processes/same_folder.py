"""Checks that all processes of a job see the same folder."""

import contextlib
import os
import socket
import time
import uuid
from pathlib import Path

from jaxdist._checkpoints.processes.group import Group
from jaxdist.errors import CheckpointError

# Network file systems may show a new file with a delay.
_PATIENCE_SECONDS = 5.0
_NAP = 0.05


def check_same_folder(group: Group, call: str, folder: Path) -> str:
    """Check that all processes see one folder, and return a string that is equal in all of them.

    Cost:
        Two exchanges of short strings; process 0 writes an empty file and deletes it.

    Raises:
        CheckpointError: A process has another folder.
    """
    name = f".jaxdist-shared-{uuid.uuid4().hex}"
    here = {"host": socket.gethostname(), "folder": str(folder), "name": name, "error": ""}
    if group.process.is_first:
        try:
            (folder / name).touch()
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
                os.unlink(folder / name)
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
            "Pass a folder that all hosts share (NFS, Lustre, a mounted bucket), the same one in "
            "every process, instead of a local disk."
        )
    return str(first["name"])


def _is_there(path: Path) -> bool:
    end = time.monotonic() + _PATIENCE_SECONDS
    while not path.exists():
        if time.monotonic() >= end:
            return False
        time.sleep(_NAP)
    return True
