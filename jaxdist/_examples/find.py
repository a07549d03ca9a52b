"""Finds the configurations and notebooks of jaxdist, and their names."""

import os
from collections.abc import Mapping
from pathlib import Path

from jaxdist.errors import ConfigError

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
