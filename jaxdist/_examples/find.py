"""Finds the configurations and notebooks of jaxdist by name, and copies them."""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from jaxdist._called import name_call, refuse
from jaxdist._validate import as_path
from jaxdist.errors import ArgumentError, ConfigError

CONFIGS = "configs"
NOTEBOOKS = "notebooks"
_SUFFIX = ".toml"
# A wheel has both folders here; see `force-include` in pyproject.toml. A checkout, also in an
# editable install, has them next to the package.
_ROOTS = (Path(__file__).parent, Path(__file__).parents[2])


def find_folder(kind: str) -> Path:
    """Return the folder of the configurations or of the notebooks.

    Args:
        kind: `"configs"` or `"notebooks"`.
    """
    return next((root / kind for root in _ROOTS if (root / kind).is_dir()), _ROOTS[0] / kind)


def list_configs() -> Mapping[str, Path]:
    """Return the configurations by name, such as `digits_mirrored` and `published/v5p_64b`.

    Example:
        >>> list_configs()["digits_mirrored"].name
        'digits_mirrored.toml'
    """
    folder = find_folder(CONFIGS)
    found = sorted(folder.rglob(f"*{_SUFFIX}"), key=lambda path: (len(path.parts), path))
    return {p.relative_to(folder).with_suffix("").as_posix(): p for p in found}


def list_notebooks() -> Mapping[str, Path]:
    """Return the notebooks by name.

    Example:
        >>> list_notebooks()["own_data"].name
        'own_data.ipynb'
    """
    return {path.stem: path for path in sorted(find_folder(NOTEBOOKS).glob("*.ipynb"))}


def find_config(path: str) -> str:
    """Return the path of a configuration from its path or name.

    Args:
        path: The path of a file; or, if no such file exists, a name of `list_configs()`.

    Returns:
        The path of the configuration with this name, or `path` if there is none.

    Raises:
        ConfigError: The current folder has another configuration with this name.

    Example:
        >>> find_config("no_such_name"), Path(find_config("digits_mirrored")).name
        ('no_such_name', 'digits_mirrored.toml')
    """
    found = None if os.path.isfile(path) else list_configs().get(path)
    if found is None:
        return path
    for near in (Path(path + _SUFFIX), Path(CONFIGS, path + _SUFFIX)):
        if near.is_file() and near.read_bytes() != found.read_bytes():
            raise ConfigError(
                f"The configuration {path!r} was asked for by name, and {str(near)!r} differs from "
                f"the one that comes with jaxdist, {str(found)!r}.\n\n"
                "A name means a configuration of jaxdist.\n\nPass the path of the one you mean."
            )
    return str(found)


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
