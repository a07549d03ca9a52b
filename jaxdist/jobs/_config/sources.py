"""Reads the entries of TOML files and of `--set`, with their origins."""

import dataclasses
import difflib
import re
import tomllib
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxdist._examples import list_configs
from jaxdist._validate import as_list, as_path
from jaxdist.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class GivenValue:
    """One value from the user, and its origin.

    Attributes:
        section: The section of its entry.
        key: The key of its entry; empty if the value is for the section itself.
        value: The value that TOML parsed.
        where: `"file.toml, line 7"` or `"--set section.key=value"`.
        raw: The text after `=` of an override; None for a file.
    """

    section: str
    key: str
    value: Any
    where: str
    raw: str | None = None


def check_sources(path: Any, overrides: Any) -> tuple[str, list[str]]:
    """Check the path of a configuration file and its overrides, and return them."""
    remedy = "Pass for instance overrides=['training.steps=10']."
    what = "a list of strings 'section.key=value'"
    texts = as_list("overrides", overrides, what, remedy, kind=str)
    return as_path("path", path, "configs/digits_mirrored.toml"), texts


def read_text(path: str | Path) -> str:
    """Read the text of a configuration file.

    Raises:
        ConfigError: The file does not exist or cannot be read.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            f"The configuration file {str(path)!r} does not exist (looked in {Path.cwd()})."
            "\n\nA configuration is a TOML file, or has the name of one that comes with jaxdist."
            f"\n\n{_suggest_files(Path(path))}"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"The configuration file {str(path)!r} cannot be read: {error}.\n\n"
            "It must be a TOML file in UTF-8 that you may read.\n\n"
            f"{_suggest_files(Path(path))}"
        ) from error


def _suggest_files(path: Path) -> str:
    near = sorted(str(p) for p in path.parent.glob("*.toml")) if path.parent.is_dir() else []
    names = list(list_configs())
    nearest = find_nearest(path.stem, names)
    if nearest is not None and not near:
        return f"Did you mean {nearest!r}? The names are {', '.join(names)}."
    files = f"Pass one of {near[:5]}, or" if near else "Pass the path of a TOML file, or"
    return f"{files} one of the names {', '.join(names)}."


def read_file_entries(path: str | Path, text: str, problems: list[str]) -> Iterator[GivenValue]:
    """Yield the entries of a TOML text. Add its syntax error, if any, to `problems`."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        problems.append(f"{path} is not valid TOML: {error}.")
        return
    # `tomllib` does not report the lines of entries, and errors must name them.
    lines = find_lines(text)
    for section, body in document.items():
        first = min((n for name, n in lines.items() if name[0] == section), default=1)
        line = lines.get((section,), first)
        if not isinstance(body, dict) or not body:
            yield GivenValue(section, "", body, f"{path}, line {line}")
            continue
        for key, value in body.items():
            here = lines.get((section, key), line)
            yield GivenValue(section, key, value, f"{path}, line {here}")


def read_overrides(
    schema: type[Any], overrides: Sequence[str], problems: list[str]
) -> Iterator[GivenValue]:
    """Yield the entries of overrides. Add overrides with syntax errors to `problems`."""
    for text in overrides:
        name, equals, raw = text.partition("=")
        section, dot, key = name.strip().partition(".")
        if not equals or not dot or not key:
            example = list_names(schema)[0]
            problems.append(
                f"--set {text}: an override is written section.key=value, for instance "
                f"--set {find_nearest(name.strip(), list_names(schema)) or example}=VALUE."
            )
            continue
        yield GivenValue(section, key, _parse(raw), f"--set {text}", raw.strip())


def _parse(raw: str) -> Any:
    """Parse the text after `=` as TOML; if it is not TOML, return the text itself."""
    try:
        parsed = tomllib.loads(f"value = {raw}")
    except tomllib.TOMLDecodeError:
        return raw.strip()
    # A line break in the text could add more entries.
    return parsed["value"] if list(parsed) == ["value"] else raw.strip()


_KEY = r"""(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')"""
_DOTTED = rf"{_KEY}(?:\s*\.\s*{_KEY})*"
_HEADER = re.compile(rf"^\s*\[\[?\s*({_DOTTED})\s*\]\]?")
_ENTRY = re.compile(rf"^\s*({_DOTTED})\s*=")


def find_lines(text: str) -> dict[tuple[str, ...], int]:
    """Return the line, from 1, on which each table and each entry of a TOML text starts.

    Example:
        >>> find_lines("# job\\n[data]\\nseed = 1\\n")
        {('data',): 2, ('data', 'seed'): 3}
    """
    lines: dict[tuple[str, ...], int] = {}
    table: tuple[str, ...] = ()
    quote = ""  # the mark that ends the current multi-line string
    for number, line in enumerate(text.splitlines(), 1):
        if not quote:
            if header := _HEADER.match(line):
                table = _split_dotted(header[1])
                lines.setdefault(table, number)
            elif entry := _ENTRY.match(line):
                lines.setdefault((*table, *_split_dotted(entry[1])), number)
        # Inside a multi-line string, a line may look like an entry.
        for mark in ('"""', "'''"):
            if quote in ("", mark) and line.count(mark) % 2:
                quote = "" if quote else mark
                break
    return lines


def _split_dotted(dotted: str) -> tuple[str, ...]:
    return tuple(part.strip("\"'") for part in re.findall(_KEY, dotted))


def find_nearest(name: str, valid: Sequence[str]) -> str | None:
    """Return the valid name that is most similar to `name`; None if none is similar."""
    return next(iter(difflib.get_close_matches(name, valid, n=1, cutoff=0.5)), None)


def get_sections(schema: type[Any]) -> dict[str, Any]:
    """Return the sections of a schema: its fields that are dataclasses."""
    hints = typing.get_type_hints(schema)
    return {name: kind for name, kind in hints.items() if dataclasses.is_dataclass(kind)}


def list_names(schema: type[Any]) -> list[str]:
    """Return the names of all entries in sections of a schema, as `section.key`."""
    # The user chooses the keys in the section of the compiler.
    kinds = {name: kind for name, kind in get_sections(schema).items() if name != "compiler"}
    return [f"{s}.{f.name}" for s in kinds for f in dataclasses.fields(kinds[s])]
