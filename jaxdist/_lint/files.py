"""Finds the files that `jaxdist lint` reads."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxdist.errors import ArgumentError

SUFFIXES = {".py", ".ipynb"}


def find_files(paths: Sequence[Path]) -> list[Path]:
    """Return all programs in files and folders, each once, in the order of their names.

    Raises:
        ArgumentError: A path does not exist, or contains no program.
    """
    found: dict[Path, None] = {}
    for path in paths:
        if not path.exists():
            raise ArgumentError(
                f"There is no file or folder {str(path)!r}."
                "\n\nIt takes Python files, notebooks, and folders."
                f"\n\nThe current folder is {Path.cwd()}."
            )
        # A named file is read as Python, whatever its name is.
        inside = sorted(_walk(path)) if path.is_dir() else [path]
        if not inside:
            raise ArgumentError(
                f"There are 0 programs in the folder {str(path)!r}."
                "\n\nIt takes Python files, notebooks, and folders that have some. Hidden folders "
                "and virtual environments are left out."
                "\n\nName a file, or another folder."
            )
        found.update(dict.fromkeys(inside))
    return list(found)


def _walk(folder: Path) -> Iterator[Path]:
    for entry in folder.iterdir():
        if entry.name.startswith(".") or entry.name in {"__pycache__", "node_modules"}:
            continue
        if entry.is_dir() and not entry.is_symlink():
            if not (entry / "pyvenv.cfg").exists():
                yield from _walk(entry)
        elif entry.suffix in SUFFIXES and entry.is_file():
            yield entry
