"""Copies the configurations and notebooks into a folder of the user."""

import json
import re
import shutil
import tempfile
from pathlib import Path

from jaxdist._called import name_call, refuse
from jaxdist._examples.find import CONFIGS, NOTEBOOKS, find_folder, list_configs, list_notebooks
from jaxdist._validate import as_path
from jaxdist.errors import ArgumentError

# The pages are not copied: a link to one becomes its name in the documentation.
_LINK_TO_PAGE = re.compile(r"\[([^\]]+)\]\(\.\./(docs/[^)#]+)[^)]*\)")


def copy_examples(directory: str | Path) -> list[Path]:
    """Copy all configurations and notebooks into `configs` and `notebooks` in a folder.

    The files are complete or absent: they are written next to their places and moved together.

    Args:
        directory: The folder; it is made if it does not exist.

    Returns:
        The copies.

    Raises:
        ArgumentError: The folder already has `configs` or `notebooks`, or cannot be written.

    Example:
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     [path.name for path in copy_examples(folder)][:2]
        ['digits_mirrored.toml', 'digits_multi_worker.toml']
    """
    folder = Path(as_path("FOLDER", directory, "examples")).absolute()
    for kind in (CONFIGS, NOTEBOOKS):
        # A broken link exists, too.
        if (folder / kind).exists() or (folder / kind).is_symlink():
            raise refuse(
                f"{str(directory)!r}, which has {kind!r} already.",
                f"It makes {CONFIGS!r} and {NOTEBOOKS!r} there, and replaces nothing.",
                f"Pass another folder, or move {str(folder / kind)!r} away.",
            )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as beside:
            names = _write(Path(beside))
            _move_all(Path(beside), folder)
    except OSError as error:
        raise ArgumentError(
            f"{name_call()} cannot write into {str(directory)!r}: {error}.\n\n"
            "It makes two folders there.\n\nPass a folder that you may write."
        ) from error
    return [folder / name for name in names]


def _write(folder: Path) -> list[Path]:
    """Write the copies, and return their places in the folder."""
    names: list[Path] = []
    for config in list_configs().values():
        names.append(Path(CONFIGS) / config.relative_to(find_folder(CONFIGS)))
        (folder / names[-1]).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(config, folder / names[-1])
    for notebook in list_notebooks().values():
        names.append(Path(NOTEBOOKS) / notebook.name)
        (folder / names[-1]).parent.mkdir(exist_ok=True)
        (folder / names[-1]).write_text(_name_pages(notebook.read_text("utf-8")), "utf-8")
    return names


def _name_pages(notebook: str) -> str:
    content = json.loads(notebook)
    for cell in content["cells"]:
        if cell["cell_type"] == "markdown":
            cell["source"] = [_LINK_TO_PAGE.sub(r"\1 (`\2`)", line) for line in cell["source"]]
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def _move_all(beside: Path, folder: Path) -> None:
    moved: list[Path] = []
    try:
        for kind in (CONFIGS, NOTEBOOKS):
            # Not `shutil.move`: if the folder exists by now, it would move into it.
            (beside / kind).rename(folder / kind)
            moved.append(folder / kind)
    except OSError:
        for path in moved:
            shutil.rmtree(path)
        raise
