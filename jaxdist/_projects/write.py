"""Writes a project from its templates."""

import keyword
import shutil
import string
import tempfile
from pathlib import Path

from jaxdist._called import name_call, refuse
from jaxdist._validate import as_path
from jaxdist.errors import ArgumentError

_TEMPLATES = Path(__file__).parent / "template"
_SUFFIX = ".template"


def write_project(directory: str | Path) -> list[Path]:
    """Write a project into a new folder, which gives the project its name.

    The files are complete or absent: they are written next to the folder and moved together.

    Args:
        directory: The folder. It must not exist, or must be empty.

    Returns:
        The files.

    Raises:
        ArgumentError: The folder has files, its name is not a Python name, or it cannot be
            written.

    Example:
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     [path.name for path in write_project(Path(folder) / "flowers")][:4]
        ['README.md', 'config.toml', 'data.py', 'flowers.ipynb']
    """
    folder = Path(as_path("NAME", directory, "flowers")).absolute()
    name = folder.name
    if not name.isidentifier() or keyword.iskeyword(name):
        raise refuse(
            f"{name!r}.",
            "The name of a project has letters, digits and underscores, and does not begin with a "
            "digit.",
            f"Pass for instance {_suggest(name)}.",
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise refuse(
            f"{str(directory)!r}, which has files already.",
            "It writes a new folder, and replaces no file.",
            "Pass another name, or move the folder away.",
        )
    texts = {
        _target_of(path.name, name): string.Template(path.read_text()).substitute(name=name)
        for path in sorted(_TEMPLATES.iterdir())
        if path.name.endswith(_SUFFIX)
    }
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as beside:
            complete = Path(beside) / name
            complete.mkdir()
            for target, text in texts.items():
                (complete / target).write_text(text)
            if folder.exists():
                folder.rmdir()
            shutil.move(complete, folder)
    except OSError as error:
        raise ArgumentError(
            f"{name_call()} cannot write {str(directory)!r}: {error}.\n\n"
            "It writes a new folder.\n\nPass a folder that you may write."
        ) from error
    return [folder / target for target in sorted(texts)]


def _target_of(template: str, name: str) -> str:
    return template.removesuffix(_SUFFIX).replace("NAME", name)


def _suggest(name: str) -> str:
    letters = "".join(c if c.isalnum() and c.isascii() else "_" for c in name).strip("_")
    if not letters or keyword.iskeyword(letters):
        return "flowers"
    return letters if letters.isidentifier() else f"project_{letters}"
