"""Reading of TOML files into frozen dataclasses. Errors name the file, line and remedy."""

import dataclasses
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, UnionType
from typing import Any, Generic, Literal, TypeVar

from jaxdist._validate import ErrorNote, check_text, show
from jaxdist.errors import ArgumentTypeError, ConfigError
from jaxdist.jobs._config.sources import (
    GivenValue,
    check_sources,
    find_nearest,
    get_entries,
    get_sections,
    list_names,
    read_file_entries,
    read_overrides,
    read_text,
)

C = TypeVar("C")

_MOST_PROBLEMS_LISTED = 10
_TYPE_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}


@dataclasses.dataclass(frozen=True)
class LoadedConfig(Generic[C]):
    """A configuration, and the origin of each entry.

    Attributes:
        values: The dataclass of sections.
        origins: Maps `"section.key"` to `"file.toml, line 7"` or `"--set section.key=value"`.
    """

    values: C
    origins: Mapping[str, str]

    def origin(self, name: str) -> str:
        """Return the origin of the entry `section.key`, in words."""
        check_text("LoadedConfig.origin", "name", name, "training.steps")
        return self.origins.get(name, f"{name} (default)")


def load_config(
    schema: type[C], path: str | Path, overrides: Sequence[str] = ()
) -> LoadedConfig[C]:
    """Read a TOML file, and apply overrides `section.key=value`.

    Args:
        schema: A frozen dataclass of sections, each a frozen dataclass of entries with defaults,
            and of entries before the first section. Entries are int, float, bool,
            str, tuples of these, and `Literal`s.
        path: The TOML file. Missing entries keep their defaults.
        overrides: The values of `--set`. A later one replaces an earlier one.

    Returns:
        The configuration, and the origin of each entry.

    Raises:
        ConfigError: The file cannot be read or is no TOML; a section or key is unknown; a value
            has the wrong type or is out of range. The error lists all problems, each with its
            file and line (or option), and the nearest valid name.

    Example:
        >>> import tempfile, pathlib
        >>> from jaxdist.jobs import DigitsConfig
        >>> file = pathlib.Path(tempfile.mkdtemp(), "job.toml")
        >>> _ = file.write_text("[data]\\nbatch_size = 32\\n")
        >>> loaded = load_config(DigitsConfig, file, ["training.steps=10"])
        >>> loaded.values.data.batch_size, loaded.values.training.steps
        (32, 10)
    """
    caller = "jobs.load_config"
    given: Any = schema
    if not isinstance(given, type) or not dataclasses.is_dataclass(given):
        raise ArgumentTypeError(
            f"{caller} was given schema={show(schema)}.\n\n"
            "schema is a frozen dataclass of sections.\n\n"
            "Pass for instance schema=jobs.DigitsConfig."
        )
    source, texts = check_sources(caller, path, overrides)
    with ErrorNote(f"{caller} was given path={source!r} and overrides={texts!r}."):
        return _load(schema, source, texts)


def _load(schema: type[C], path: str, overrides: Sequence[str]) -> LoadedConfig[C]:
    text = read_text(path)
    # Problems are collected: a user who must fix several wants to see all of them at once.
    problems: list[str] = []
    items = [*read_file_entries(path, text, problems), *read_overrides(schema, overrides, problems)]
    kinds = get_sections(schema)
    sections: dict[str, dict[str, Any]] = {name: {} for name in kinds}
    alone: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for item in items:
        if item.section in get_entries(schema):
            problem = _place_top_level(schema, item, alone, origins)
        else:
            problem = _place_entry(schema, item, sections, origins)
        if problem:
            problems.append(problem)
    if problems:
        raise ConfigError(_format_report(path, problems))
    # A task may change the defaults of a section, so its class alone does not know them.
    defaults = schema()
    made = {n: dataclasses.replace(getattr(defaults, n), **own) for n, own in sections.items()}
    return LoadedConfig(schema(**alone, **made), MappingProxyType(origins))


def as_dict(config: Any) -> dict[str, Any]:
    """Return the sections and entries of a configuration as a dict that JSON can represent."""
    return dataclasses.asdict(config)


# One value and the schema


def _place_entry(
    schema: type[Any],
    item: GivenValue,
    sections: dict[str, dict[str, Any]],
    origins: dict[str, str],
) -> str | None:
    """Put a value into its section. Return the problem in words if it does not fit."""
    if item.section not in sections:
        return _describe_unknown_section(schema, item)
    if not item.key:
        if item.value == {}:
            return None
        return f"{item.where}: [{item.section}] is a section, and {item.value!r} was given for it."
    section = get_sections(schema)[item.section]
    hints = _get_hints(section)
    if item.key not in hints:
        return _describe_unknown_key(schema, section, item)
    name = f"{item.section}.{item.key}"
    value = _convert(item.value, hints[item.key], item.raw)
    if value is _MISFIT:
        return (
            f"{item.where}: {name} must be {_describe_type(hints[item.key])}, and "
            + _describe_given(item)
        )
    field = next(f for f in dataclasses.fields(section) if f.name == item.key)
    broken = _find_broken_rule(value, field)
    if broken:
        return f"{item.where}: {name} {broken}, and {_shorten(item.value)} was given."
    sections[item.section][item.key] = value
    origins[name] = item.where
    return None


def _place_top_level(
    schema: type[Any], item: GivenValue, alone: dict[str, Any], origins: dict[str, str]
) -> str | None:
    """Put a value into an entry before the sections. Return the problem in words."""
    if item.key or isinstance(item.value, dict):
        return f"{item.where}: {item.section} is an entry before the sections, and has no keys."
    hint = get_entries(schema)[item.section]
    value = _convert(item.value, hint, item.raw)
    if value is _MISFIT:
        return (
            f"{item.where}: {item.section} must be {_describe_type(hint)}, and "
            + _describe_given(item)
        )
    alone[item.section] = value
    origins[item.section] = item.where
    return None


def _describe_unknown_section(schema: type[Any], item: GivenValue) -> str:
    valid = list(get_sections(schema))
    what = f"'{item.section}.{item.key}'" if item.raw is not None else f"[{item.section}]"
    if not isinstance(item.value, dict) and not item.key:
        what = f"'{item.section}' outside a section"
    near = find_nearest(item.section, valid)
    candidates = [n for n in list_names(schema) if n.endswith(f".{item.key or item.section}")]
    meant = candidates[0] if candidates else (f"{near}.{item.key}" if near and item.key else near)
    hint = f" Did you mean {meant!r}?" if meant else ""
    return f"{item.where}: unknown section {what}; there are {', '.join(valid)}.{hint}"


def _describe_unknown_key(schema: type[Any], section: type[Any], item: GivenValue) -> str:
    valid = [f.name for f in dataclasses.fields(section)]
    near = find_nearest(item.key, valid)
    elsewhere = [n for n in list_names(schema) if n.endswith(f".{item.key}")]
    if elsewhere:
        hint = f" Did you mean {elsewhere[0]!r}?"
    else:
        hint = f" Did you mean {near!r}?" if near else ""
    keys = ", ".join(valid)
    return f"{item.where}: unknown key {item.key!r} in [{item.section}]; it has {keys}.{hint}"


_MISFIT = object()


def _convert(value: Any, hint: Any, raw: str | None) -> Any:
    """Convert `value` to the type `hint`, or return `_MISFIT`."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, UnionType):
        tried = (_convert(value, h, raw) for h in arguments)
        return next((v for v in tried if v is not _MISFIT), _MISFIT)
    if origin is Literal:
        return value if value in arguments and isinstance(value, str) else _MISFIT
    if origin is tuple:
        if not isinstance(value, list):
            return _MISFIT
        items = tuple(_convert(v, arguments[0], None) for v in value)
        return _MISFIT if any(v is _MISFIT for v in items) else items
    # In an override, `name=7` is the text "7" if the entry is a text: the shell removes quotes.
    if hint is str and raw is not None and not isinstance(value, (str, list, dict)):
        return raw
    if hint is float and type(value) is int:
        return float(value)
    # No `isinstance`: a bool is an int in Python, and `steps = true` is a mistake.
    return value if type(value) is hint else _MISFIT


def _find_broken_rule(value: Any, field: dataclasses.Field[Any]) -> str | None:
    within, length = field.metadata.get("within"), field.metadata.get("length")
    if length is not None and isinstance(value, (tuple, str)):
        broken = length.broken_by(len(value))
        if broken:
            return "must not be empty" if not value else f"has a length that {broken}"
    if within is None or isinstance(value, str):
        return None
    items = value if isinstance(value, tuple) else (value,)
    return next((b for b in map(within.broken_by, items) if b), None)


# Words


def _describe_type(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, UnionType):
        return " or ".join(_describe_type(h) for h in arguments)
    if origin is Literal:
        return " or ".join(repr(a) for a in arguments)
    if origin is tuple:
        return f"a list of {_TYPE_NAMES[arguments[0]].split(' ', 1)[-1]}s"
    return _TYPE_NAMES[hint]


def _describe_given(item: GivenValue) -> str:
    kind = {dict: "table", list: "list", str: "string", bool: "boolean", int: "integer"}
    name = kind.get(type(item.value), type(item.value).__name__)
    return f"{_shorten(item.value)} ({name}) was given."


def _shorten(value: Any) -> str:
    text = {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _get_hints(schema: type[Any]) -> dict[str, Any]:
    return typing.get_type_hints(schema)


def _format_report(path: str | Path, problems: list[str]) -> str:
    shown = problems[:_MOST_PROBLEMS_LISTED]
    more = len(problems) - len(shown)
    tail = [f"... and {more} more."] if more else []
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    head = f"The configuration {str(path)!r} is not valid ({count})."
    return "\n\n".join([head, "\n".join([*shown, *tail]), "Nothing was started."])
