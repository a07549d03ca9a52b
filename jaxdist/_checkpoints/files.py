"""Lists and deletes complete checkpoints, replaces files atomically, and reads JSON dicts."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

# The name that Orbax gives such folders, so that the next job deletes them.
TEMPORARY = "orbax-checkpoint-tmp"


def replace_file(path: Path, content: bytes) -> None:
    """Write `content` to `path` atomically.

    A reader sees either the old file or the whole new file, never a part.
    """
    # In the same folder, since a rename between file systems is not atomic. The process id prevents
    # two processes from writing to the same temporary file.
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(content)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def read_dict(path: Path) -> dict[str, Any] | None:
    """Return the dict in a JSON file; None if the file cannot be read or is not a dict."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def list_steps(directory: Path) -> tuple[int, ...]:
    """Return the steps of the complete checkpoints, oldest first."""
    # Orbax renames a directory to the number of its step when the checkpoint is complete.
    entries = directory.iterdir() if directory.is_dir() else ()
    return tuple(sorted(int(p.name) for p in entries if p.name.isdigit() and p.is_dir()))


def delete_step(directory: Path, step: int) -> None:
    """Delete a complete checkpoint."""
    # Rename it first, so that a partly deleted checkpoint does not count.
    left = directory / f"{step}.{TEMPORARY}-deleted"
    if left.exists():
        # A process was killed while deleting an earlier checkpoint of this step.
        shutil.rmtree(left)
    (directory / str(step)).rename(left)
    shutil.rmtree(left)
