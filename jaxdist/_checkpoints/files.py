"""The folders of complete checkpoints, atomic replacement of one file, and files with a dict."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

# As Orbax names such folders, so that the next job deletes them.
TEMPORARY = "orbax-checkpoint-tmp"


def replace_file(path: Path, content: bytes) -> None:
    """Write `content` to `path` atomically.

    A reader sees the old file or all of the new one, never a part.
    """
    # In the same folder, since a rename between file systems is not atomic. The process id keeps
    # two processes from writing into one temporary file.
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(content)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def read_dict(path: Path) -> dict[str, Any] | None:
    """Return the dict in a JSON file; None if the file cannot be read or has no dict."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def list_steps(directory: Path) -> tuple[int, ...]:
    """Return the steps of the complete checkpoints, the oldest first."""
    # Orbax gives a directory the number of its step when the checkpoint is complete.
    entries = directory.iterdir() if directory.is_dir() else ()
    return tuple(sorted(int(p.name) for p in entries if p.name.isdigit() and p.is_dir()))


def delete_step(directory: Path, step: int) -> None:
    """Delete a complete checkpoint."""
    # First the name, so that a checkpoint that is deleted in part does not count.
    left = directory / f"{step}.{TEMPORARY}-deleted"
    if left.exists():
        # A process was killed while it deleted an earlier checkpoint of this step.
        shutil.rmtree(left)
    (directory / str(step)).rename(left)
    shutil.rmtree(left)
