"""Links that were measured, in place of those of the table."""

import dataclasses
import json
import os
import pathlib
from collections.abc import Iterable
from typing import Any, TypeAlias

from jaxdist.cost._link import Link, Medium
from jaxdist.cost._table import TABLE
from jaxdist.errors import ArgumentTypeError, ConfigError

VARIABLE = "JAXDIST_LINKS"
VERSION = 1
_NUMBERS = ("alpha", "bytes_per_second", "memory_bytes_per_second")
_OPTIONAL = ("scatter_gather",)

Path: TypeAlias = str | os.PathLike[str]


class _Settings:
    """The links given in this process, and those of the file that the environment names."""

    given: tuple[Link, ...] | None = None
    of_environment: tuple[str, tuple[Link, ...]] = ("", ())


def links(path_or_links: Path | Iterable[Link] | None) -> tuple[Link, ...]:
    """Use measured links in place of those of the table.

    They decide which algorithm an all-reduce takes and what is packed in programs that are
    traced from then on, and the times that `explain` predicts. The environment variable
    `JAXDIST_LINKS` names a file for a whole process.

    Args:
        path_or_links: A file that `jaxdist bench collectives --save` wrote, or `cost.Link`s, each
            with the name of the row that it stands for. None goes back to the environment's
            file, or the table.

    Returns:
        The measured links that are in force.

    Raises:
        ConfigError: The file is not there, is not JSON, or has an entry that cannot be used.
        ArgumentTypeError: Neither a path nor links.

    Example:
        >>> from jaxdist import cost
        >>> slow = dataclasses.replace(cost.TABLE["cpu-threads"], alpha=1e-3)
        >>> [link.name for link in jaxdist.config.links([slow])]
        ['cpu-threads']
        >>> jaxdist.config.links(None)
        ()
    """
    if path_or_links is None:
        _Settings.given = None
    elif isinstance(path_or_links, (str, os.PathLike)):
        _Settings.given = load_links(path_or_links)
    else:
        _Settings.given = _checked(path_or_links)
    return _in_force()


def link_named(name: str) -> Link:
    """The measured link of this name, or the table's."""
    return next((link for link in _in_force() if link.name == name), TABLE[name])


def _in_force() -> tuple[Link, ...]:
    if _Settings.given is not None:
        return _Settings.given
    path = os.environ.get(VARIABLE, "")
    if path != _Settings.of_environment[0]:
        _Settings.of_environment = (path, load_links(path) if path else ())
    return _Settings.of_environment[1]


def _checked(given: Any) -> tuple[Link, ...]:
    found = tuple(given) if isinstance(given, Iterable) else None
    if found is None or not all(isinstance(link, Link) for link in found):
        raise ArgumentTypeError(
            f"jaxdist.config.links was given {given!r}, of type {type(given).__name__}.\n\n"
            "It takes the path of a file that `jaxdist bench collectives --save PATH` wrote, or a "
            "list of jaxdist.cost.Link.\n\nPass None to go back to the table."
        )
    for link in found:
        _check_name("jaxdist.config.links", link.name)
        for field in (*_NUMBERS, *_OPTIONAL):
            _check_number("jaxdist.config.links", link.name, field, getattr(link, field))
    return found


def load_links(path: Path) -> tuple[Link, ...]:
    """The links of a file.

    Raises:
        ConfigError: The file is not there, is not JSON, or has an entry that cannot be used.
    """
    where = os.fspath(path)
    try:
        content = json.loads(pathlib.Path(where).read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(
            f"The links in {where!r} cannot be read: {error}.\n\n"
            f"The file is named by jaxdist.config.links or by {VARIABLE}.\n\n"
            f"Write one with `jaxdist bench collectives --save {where}`, or leave the name out."
        ) from error
    version = content.get("version") if isinstance(content, dict) else None
    rows = content.get("links") if isinstance(content, dict) else None
    if version != VERSION or not isinstance(rows, list):
        raise ConfigError(
            f"{where!r} is no file of links: it has version {version!r} and "
            f"{'no list' if not isinstance(rows, list) else 'a list'} of links, and version "
            f"{VERSION} with a list is needed.\n\n"
            f"Write one with `jaxdist bench collectives --save {where}`."
        )
    return tuple(_link(where, number, row) for number, row in enumerate(rows))


def save_links(path: Path, measured: Iterable[Link], notes: dict[str, Any] | None = None) -> None:
    """Write links to a file that `load_links` reads; `notes` are kept beside them."""
    rows = [{**dataclasses.asdict(link), "medium": link.medium.value} for link in measured]
    content = {"version": VERSION, "links": rows, **(notes or {})}
    try:
        pathlib.Path(path).write_text(json.dumps(content, indent=2) + "\n")
    except OSError as error:
        raise ConfigError(
            f"The links cannot be written to {os.fspath(path)!r}: {error}.\n\n"
            "Name a file in a folder that exists and can be written to."
        ) from error


def _link(where: str, number: int, row: Any) -> Link:
    if not isinstance(row, dict) or not isinstance(row.get("name"), str):
        raise ConfigError(
            f"links[{number}] of {where!r} is {row!r}, and each is an object with a name.\n\n"
            f"A name is one of {sorted(TABLE)}."
        )
    name = row["name"]
    _check_name(where, name)
    known = TABLE[name]
    numbers = {field: row.get(field) for field in _NUMBERS}
    numbers |= {field: row.get(field, getattr(known, field)) for field in _OPTIONAL}
    for field, value in numbers.items():
        _check_number(where, name, field, value)
    checked = {field: float(value or 0) for field, value in numbers.items()}
    return Link(name, source=str(row.get("source", where)), medium=Medium(known.medium), **checked)


def _check_name(where: str, name: str) -> None:
    if name not in TABLE:
        raise ConfigError(
            f"{where}: there is no link named {name!r}.\n\nIt is one of {sorted(TABLE)}."
        )


def _check_number(where: str, name: str, field: str, value: Any) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    least_is_valid = field == "alpha"
    fits = is_number and (value >= 0 if least_is_valid else value > 0) and value < float("inf")
    if not fits:
        raise ConfigError(
            f"{where}: {field} of the link {name!r} is {value!r}.\n\n"
            f"It is a finite number {'from 0 on' if least_is_valid else 'above 0'}; in the table "
            f"it is {getattr(TABLE[name], field)!r}."
        )
