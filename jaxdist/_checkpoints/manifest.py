"""Writes and compares manifests: size and checksum of each file, to name a damaged file."""

import json
import zlib
from pathlib import Path

from jaxdist._checkpoints.files import list_steps, read_dict, replace_file

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
        return f"{file} has the right size and other bytes than were written."
    return None


def _measure_file(path: Path) -> tuple[int, int]:
    content = path.read_bytes()
    return len(content), zlib.crc32(content)
