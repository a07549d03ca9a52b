"""Lists, deletes and compares complete checkpoints, and replaces and reads files."""

import json
import os
import shutil
import zlib
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


_MANIFESTS = "manifests"  # the folder of the manifests


def write_manifest(directory: Path, step: int) -> None:
    """Write size and checksum of the files of a checkpoint to a JSON file, atomically.

    The manifests of checkpoints that no longer exist are deleted.
    """
    path, root = _get_path(directory, step), directory / str(step)
    path.parent.mkdir(exist_ok=True)
    files = {
        str(p.relative_to(root)): _measure_file(p) for p in sorted(root.rglob("*")) if p.is_file()
    }
    replace_file(path, json.dumps(files, indent=1).encode())
    kept = {_get_path(directory, kept) for kept in list_steps(directory)}
    for file in set(path.parent.glob("*.json")) - kept:
        # Another process of the job may delete it at the same time.
        file.unlink(missing_ok=True)


def remove_manifest(directory: Path, step: int) -> None:
    """Delete the manifest of an earlier checkpoint of this step, if one exists."""
    _get_path(directory, step).unlink(missing_ok=True)


def find_damage(directory: Path, step: int, *, read_contents: bool = True) -> list[str]:
    """Return a sentence for each problem with the files of a checkpoint.

    Without a manifest the list is empty: see Note [Complete or absent].

    Args:
        directory: The directory of the checkpoints.
        step: The step of the checkpoint.
        read_contents: Whether to read the files. If not, only their sizes are compared.
    """
    files = read_dict(_get_path(directory, step)) or {}
    root = directory / str(step)
    found = [
        _describe_problem(root / name, size, checksum, read_contents)
        for name, (size, checksum) in files.items()
    ]
    return [problem for problem in found if problem]


def _get_path(directory: Path, step: int) -> Path:
    return directory / _MANIFESTS / f"{step}.json"


def _describe_problem(file: Path, size: int, checksum: int, read_contents: bool) -> str | None:
    try:
        there = file.stat().st_size
        found = _measure_file(file)[1] if read_contents and there == size else checksum
    except (FileNotFoundError, NotADirectoryError):
        # The file may have been deleted between `stat` and `read_bytes`.
        return f"{file} is missing."
    except OSError as error:
        return f"{file} cannot be read: {error.strerror}."
    if there != size:
        return f"{file} has {there} bytes, {size} were written."
    if found != checksum:
        return f"{file} has the right size, but not the bytes that were written."
    return None


def _measure_file(path: Path) -> tuple[int, int]:
    content = path.read_bytes()
    return len(content), zlib.crc32(content)
