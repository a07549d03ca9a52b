"""Size and checksum of every file of a checkpoint, so that a damaged one can be named."""

import json
import zlib
from collections.abc import Iterable
from pathlib import Path

from jaxdist._checkpoints.files import replace_file

MANIFESTS = "manifests"  # the folder of them


def write_manifest(path: Path, root: Path) -> None:
    """Record the files below `root` in a JSON file, in one piece."""
    path.parent.mkdir(exist_ok=True)
    files = {
        str(p.relative_to(root)): _measure_file(p) for p in sorted(root.rglob("*")) if p.is_file()
    }
    replace_file(path, json.dumps(files, indent=1).encode())


def remove_other_manifests(folder: Path, kept: Iterable[int]) -> None:
    """Delete the manifests of steps that are gone."""
    names = {f"{step}.json" for step in kept}
    for file in folder.glob("*.json"):
        if file.name not in names:
            file.unlink(missing_ok=True)


def find_damage(path: Path, root: Path) -> list[str]:
    """What is wrong with the files below `root`, in words; nothing where there is no manifest."""
    try:
        files = dict(json.loads(path.read_bytes()))
    except (OSError, ValueError):
        return []
    found = [_describe_problem(root / name, *record) for name, record in files.items()]
    return [problem for problem in found if problem]


def find_missing(folder: Path, step: int) -> list[str]:
    """The same by sizes only, for a step in a folder of checkpoints: no file is read whole."""
    try:
        files = dict(json.loads((folder / MANIFESTS / f"{step}.json").read_bytes()))
    except (OSError, ValueError):
        return []
    root = folder / str(step)
    there = {name: root / name for name in files}
    return [
        str(path)
        for name, path in there.items()
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
