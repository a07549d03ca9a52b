"""Manifests: size and checksum of every file of a checkpoint, to name a damaged file."""

import json
import zlib
from collections.abc import Iterable
from pathlib import Path

from jaxdist._checkpoints.files import replace_file

MANIFESTS = "manifests"  # the folder of the manifests


def write_manifest(path: Path, root: Path) -> None:
    """Write size and checksum of the files below `root` to a JSON file, atomically."""
    path.parent.mkdir(exist_ok=True)
    files = {
        str(p.relative_to(root)): _measure_file(p) for p in sorted(root.rglob("*")) if p.is_file()
    }
    replace_file(path, json.dumps(files, indent=1).encode())


def remove_other_manifests(folder: Path, kept: Iterable[int]) -> None:
    """Delete the manifests of all steps that are not in `kept`."""
    names = {f"{step}.json" for step in kept}
    for file in folder.glob("*.json"):
        if file.name not in names:
            # Another process of the job may delete it at the same time.
            file.unlink(missing_ok=True)


def find_damage(path: Path, root: Path) -> list[str]:
    """Return what is wrong with the files below `root`, in words.

    Without a manifest the list is empty: see Note [Complete or absent].
    """
    try:
        files = dict(json.loads(path.read_bytes()))
    except (OSError, ValueError):
        return []
    found = [_describe_problem(root / name, *record) for name, record in files.items()]
    return [problem for problem in found if problem]


def find_missing(folder: Path, step: int) -> list[str]:
    """Return the files of a step that are missing or have another size than in the manifest.

    It reads no file of the checkpoint: `find_damage` compares the contents.
    """
    try:
        files = dict(json.loads((folder / MANIFESTS / f"{step}.json").read_bytes()))
    except (OSError, ValueError):
        return []
    root = folder / str(step)
    paths = {name: root / name for name in files}
    return [
        str(path)
        for name, path in paths.items()
        if not path.is_file() or path.stat().st_size != files[name][0]
    ]


def _describe_problem(file: Path, size: int, checksum: int) -> str | None:
    if not file.is_file():
        return f"{file} is missing."
    there = file.stat().st_size
    if there != size:
        return f"{file} has {there} bytes, {size} were written."
    if _measure_file(file)[1] != checksum:
        return f"{file} has the right size and other bytes than were written."
    return None


def _measure_file(path: Path) -> tuple[int, int]:
    content = path.read_bytes()
    return len(content), zlib.crc32(content)
