"""Measured links, which replace those of the table."""

import dataclasses
import json
import os
import pathlib
from collections.abc import Iterable
from typing import Any, TypeAlias

from jaxdist._called import called, refuse, refuse_type
from jaxdist._validate import ErrorNote, as_list, as_path, check_instance, show
from jaxdist.cost._link import Link
from jaxdist.cost._table import TABLE
from jaxdist.errors import ConfigError

VARIABLE = "JAXDIST_LINKS"
VERSION = 1
_NUMBERS = ("alpha", "bytes_per_second", "memory_bytes_per_second")
_OPTIONAL = "scatter_gather"

Path: TypeAlias = str | os.PathLike[str]


class _Settings:
    """The links set in this process, and the links of the file that the environment names."""

    given: tuple[Link, ...] | None = None
    # With the path that the links were read from, so that a changed variable is noticed.
    of_environment: tuple[str, tuple[Link, ...]] = ("", ())


@called("jaxdist.config.links")
def links(path_or_links: Path | Iterable[Link] | None) -> tuple[Link, ...]:
    """Use measured links instead of those of the table.

    They decide how an all-reduce is computed and packed in programs that are traced later. They
    also decide the times that `explain` predicts. The environment variable `JAXDIST_LINKS` names a
    file for a whole process.

    Args:
        path_or_links: A file that `jaxdist bench collectives --save` wrote, or `cost.Link`s, each
            with the name of the row that it replaces. None restores the environment's file, or the
            table.

    Returns:
        The measured links that are used now.

    Raises:
        ConfigError: The file does not exist, is not JSON, or has an invalid entry.
        ArgumentTypeError: The argument is neither a path nor links.

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
        path = as_path("path_or_links", path_or_links, "links.json")
        with ErrorNote(f"jaxdist.config.links was given path_or_links={path!r}."):
            _Settings.given = load_links(path)
    else:
        _Settings.given = _check_links(path_or_links)
    return _find_current_links()


def find_link(name: str) -> Link:
    """Return the measured link with a name, or that of the table."""
    return next((link for link in _find_current_links() if link.name == name), TABLE[name])


def _find_current_links() -> tuple[Link, ...]:
    """Return the measured links that are used now."""
    if _Settings.given is not None:
        return _Settings.given
    # Read at each use, not at import, so that a program can set the variable after it imports
    # jaxdist. The file is read again only if the path changes.
    path = os.environ.get(VARIABLE, "")
    if path != _Settings.of_environment[0]:
        _Settings.of_environment = (path, load_links(path) if path else ())
    return _Settings.of_environment[1]


def _check_links(given: Any) -> tuple[Link, ...]:
    """Return links from an iterable, checked."""
    what = "the path of a file of links, or a list of jaxdist.cost.Link"
    remedy = "Pass None to go back to the table."
    found = tuple(as_list("path_or_links", given, what, remedy))
    if not all(isinstance(link, Link) for link in found):
        raise refuse_type(
            f"path_or_links={show(given)}.",
            "path_or_links is the path of a file that `jaxdist bench collectives --save PATH` "
            "wrote, or a list of jaxdist.cost.Link.",
            "Pass None to go back to the table.",
        )
    for link in found:
        _check_name("jaxdist.config.links", link.name)
        for field in (*_NUMBERS, _OPTIONAL):
            _check_number("jaxdist.config.links", link.name, field, getattr(link, field))
    return found


@called("cost.load_links")
def load_links(path: Path) -> tuple[Link, ...]:
    """Return the links of a file.

    Raises:
        ConfigError: The file does not exist, is not JSON, or has an invalid entry.
    """
    where = as_path("path", path, "links.json")
    try:
        content = json.loads(pathlib.Path(where).read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(
            f"The links in {where!r} (the path of cost.load_links) cannot be read: {error}.\n\n"
            f"The file is named by jaxdist.config.links or by {VARIABLE}.\n\n"
            f"Write one with `jaxdist bench collectives --save {where}`, or leave the name out."
        ) from error
    version = content.get("version") if isinstance(content, dict) else None
    rows = content.get("links") if isinstance(content, dict) else None
    if version != VERSION or not isinstance(rows, list):
        raise ConfigError(
            f"{where!r} is not a file of links: it has version {version!r} and "
            f"{'no list' if not isinstance(rows, list) else 'a list'} of links.\n\n"
            f"A file of links has version {VERSION} and a list of links.\n\n"
            f"Write one with `jaxdist bench collectives --save {where}`."
        )
    return tuple(_read_link(where, number, row) for number, row in enumerate(rows))


@called("cost.save_links")
def save_links(path: Path, measured: Iterable[Link], notes: dict[str, Any] | None = None) -> None:
    """Write links to a file that `load_links` reads; the file also gets `notes`."""
    path = as_path("path", path, "links.json")
    what, remedy = "a list of cost.Link", "Pass for instance measured=[fit.link]."
    links_to_write = as_list("measured", measured, what, remedy, kind=Link)
    if notes is not None:
        rule = "a dict that JSON can hold, or None"
        check_instance("notes", notes, dict, rule, "Pass for instance {'host': 'a'}.")
    rows = [{**dataclasses.asdict(x), "medium": x.medium.value} for x in links_to_write]
    for row in rows:
        del row["curve"]  # a measured link has none
    try:
        # Before the file is opened: notes that JSON cannot write then leave an old file unchanged.
        content = json.dumps({"version": VERSION, "links": rows, **(notes or {})}, indent=2)
    except (TypeError, ValueError) as error:
        raise refuse_type(
            f"notes={show(notes)}: {error}.",
            "notes are what JSON can hold.",
            "Turn arrays into lists or numbers.",
        ) from error
    try:
        pathlib.Path(path).write_text(content + "\n")
    except OSError as error:
        raise refuse(
            f"path={path!r}, which cannot be written: {error}.",
            "path is a file in a folder that exists and can be written to.",
            "Pass another path, such as path='links.json'.",
            kind=ConfigError,
        ) from error


def _read_link(where: str, number: int, row: Any) -> Link:
    """Return the link of one row of a file, checked."""
    if not isinstance(row, dict) or not isinstance(row.get("name"), str):
        raise ConfigError(
            f"links[{number}] of {where!r} is {row!r}.\n\n"
            f"Each link is an object whose name is one of {sorted(TABLE)}.\n\n"
            f"Write the file with `jaxdist bench collectives --save {where}`."
        )
    name = row["name"]
    _check_name(where, name)
    known = TABLE[name]
    numbers = {field: row.get(field) for field in _NUMBERS}
    # A file may omit this one. The number of the table then applies.
    numbers[_OPTIONAL] = row.get(_OPTIONAL, known.scatter_gather)
    for field, value in numbers.items():
        _check_number(where, name, field, value)
    checked: dict[str, Any] = {field: float(value or 0) for field, value in numbers.items()}
    # Without the curve of NCCL: measured numbers are already what a program reaches.
    source = str(row.get("source", where))
    return dataclasses.replace(known, **checked, source=source, curve=None)


def _check_name(where: str, name: str) -> None:
    """Refuse the name of a link that the table does not have."""
    if name not in TABLE:
        raise ConfigError(
            f"{where}: there is no link named {name!r}.\n\nThe links are {sorted(TABLE)}.\n\n"
            "Use one of these names."
        )


def _check_number(where: str, name: str, field: str, value: Any) -> None:
    """Refuse a number that a link cannot have."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    least_is_valid = field == "alpha"
    fits = is_number and (value >= 0 if least_is_valid else value > 0) and value < float("inf")
    if not fits:
        raise ConfigError(
            f"{where}: {field} of the link {name!r} is {value!r}.\n\n"
            f"It is a finite number {'from 0 up' if least_is_valid else 'above 0'}.\n\n"
            f"Use for instance the number of the table, {getattr(TABLE[name], field)!r}."
        )
