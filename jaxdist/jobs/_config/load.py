"""Reads TOML files into frozen dataclasses. Errors name the file, line and remedy."""

import dataclasses
import math
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, UnionType
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec

from jaxdist._buckets import as_place, is_in_bucket
from jaxdist._called import called, refuse_type
from jaxdist._program import as_compiler_options
from jaxdist._validate import ErrorNote, as_local_path, check_text, format_lines, respell, show
from jaxdist.errors import ArgumentError, ArgumentTypeError, ConfigError
from jaxdist.jobs._config.schema import LARGEST, CompilerConfig, LocalPath, LocalPathOrNone, Place
from jaxdist.jobs._config.sources import (
    GivenValue,
    check_sources,
    find_nearest,
    get_sections,
    list_names,
    read_file_entries,
    read_overrides,
    read_text,
)

C = TypeVar("C")

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

    @called("LoadedConfig.origin")
    def origin(self, name: str) -> str:
        """Return the origin of the entry `section.key` as a string."""
        check_text("name", name, "training.steps")
        return self.origins.get(name, f"{name} (default)")


@called("jobs.load_config")
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
        ConfigError: The file cannot be read or is not TOML; a section or key is unknown; a value
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
        raise refuse_type(
            f"schema={show(schema)}.",
            "schema is a frozen dataclass of sections.",
            "Pass for instance schema=jobs.DigitsConfig.",
        )
    source, texts = check_sources(path, overrides)
    with ErrorNote(f"{caller} was given path={source!r} and overrides={texts!r}."):
        return _load(schema, source, texts)


def _load(schema: type[C], path: str, overrides: Sequence[str]) -> LoadedConfig[C]:
    text = read_text(path)
    # Problems are collected: a user who must fix several wants to see all of them at once.
    problems: list[str] = []
    items = [*read_file_entries(path, text, problems), *read_overrides(schema, overrides, problems)]
    # Entries before the first section belong to a section with an empty name.
    values: dict[str, dict[str, Any]] = {name: {} for name in ("", *get_sections(schema))}
    origins: dict[str, str] = {}
    for item in items:
        problem = _place(schema, item, values, origins)
        if problem:
            problems.append(problem)
    if problems:
        raise ConfigError(_format_report(path, problems))
    # A task may change the defaults of a section, so the section's class does not know them.
    defaults, alone = schema(), values.pop("")
    made = {n: dataclasses.replace(getattr(defaults, n), **own) for n, own in values.items()}
    return LoadedConfig(schema(**alone, **made), MappingProxyType(origins))


# One value and the schema


def _place(
    schema: type[Any], item: GivenValue, values: dict[str, dict[str, Any]], origins: dict[str, str]
) -> str | None:
    """Put a value into its section. If it does not fit, return a description of the problem."""
    if item.section not in values:
        if item.section not in {field.name for field in dataclasses.fields(schema)}:
            return _describe_unknown_section(schema, item)
        if item.key or isinstance(item.value, dict):
            return f"{item.where}: {item.section} is an entry before the sections, and has no keys."
        item = dataclasses.replace(item, section="", key=item.section)
    elif not item.key:
        if item.value == {}:
            return None
        return f"{item.where}: [{item.section}] is a section, and {item.value!r} was given for it."
    section, key = get_sections(schema).get(item.section, schema), item.key
    if section is CompilerConfig:
        return _place_option(item, values[item.section], origins)
    name = f"{item.section}.{key}".removeprefix(".")
    kinds = typing.get_type_hints(section, include_extras=True)
    if key not in kinds:
        return _describe_unknown_key(schema, section, item)
    bare = typing.get_type_hints(section)[key]
    given = item.value
    if typing.get_origin(bare) is Literal:
        given = respell(given, typing.get_args(bare))
    # An override `name=7` is the string "7" if the entry is a string: the shell removes quotes.
    is_text = item.raw is None or isinstance(given, (str, list, dict))
    if not is_text and not _fits(given, bare) and _fits(item.raw, bare):
        given = item.raw
    try:
        value = msgspec.convert(given, kinds[key])
    except msgspec.ValidationError:
        if not _fits(given, bare):
            rule, found = f"must be {_describe_type(bare)}", _describe_given(item)
        else:
            rule = next(_iterate_broken_rules(given, kinds[key]))
            found = f"{_shorten(item.value)} was given."
        return f"{item.where}: {name} {rule}, and {found}"
    if kinds[key] in (LocalPath, LocalPathOrNone, Place):
        try:
            if kinds[key] == Place and is_in_bucket(value):
                value = str(as_place(name, value, "runs/job"))
            else:
                value = as_local_path(f"{name} is {value!r}", value)
        except ArgumentError as error:
            return f"{item.where}: {' '.join(str(error).split())}"
    values[item.section][key] = value
    origins[name] = item.where
    return None


@called("[compiler]")
def _place_option(item: GivenValue, values: dict[str, Any], origins: dict[str, str]) -> str | None:
    """Put an option of the compiler into its section, whose keys have no schema."""
    option = (item.key, item.value)
    # If an option has two values, the later one wins, as for all entries.
    others = [(key, value) for key, value in values.get("options", ()) if key != item.key]
    try:
        values["options"] = as_compiler_options((*others, option))
    except (ArgumentError, ArgumentTypeError) as error:
        return f"{item.where}: {' '.join(str(error).split())}"
    origins[f"{item.section}.{item.key}"] = origins["compiler.options"] = item.where
    return None


def _fits(value: Any, kind: Any) -> bool:
    """Whether msgspec can convert a value to a type."""
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return False
    return True


def _describe_unknown_section(schema: type[Any], item: GivenValue) -> str:
    valid = list(get_sections(schema))
    what = f"'{item.section}.{item.key}'" if item.raw is not None else f"[{item.section}]"
    if not isinstance(item.value, dict) and not item.key:
        what = f"'{item.section}' outside a section"
    near = find_nearest(item.section, valid)
    near = f"{near}.{item.key}" if near and item.key else near
    hint = _make_hint(schema, item.key or item.section, near)
    return f"{item.where}: unknown section {what}; the sections are {', '.join(valid)}.{hint}"


def _describe_unknown_key(schema: type[Any], section: type[Any], item: GivenValue) -> str:
    valid = [f.name for f in dataclasses.fields(section)]
    hint = _make_hint(schema, item.key, find_nearest(item.key, valid))
    keys = ", ".join(valid)
    return f"{item.where}: unknown key {item.key!r} in [{item.section}]; it has {keys}.{hint}"


def _make_hint(schema: type[Any], key: str, near: str | None) -> str:
    """Propose the section that has this key, or else the nearest name."""
    meant = next((name for name in list_names(schema) if name.endswith(f".{key}")), near)
    return f" Did you mean {meant!r}?" if meant else ""


# Wording


def _describe_type(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, UnionType):
        return " or ".join(_describe_type(h) for h in arguments)
    if origin is Literal:
        return " or ".join(repr(a) for a in arguments)
    if origin is tuple:
        return f"a list of {_TYPE_NAMES[arguments[0]].split(' ', 1)[-1]}s"
    return _TYPE_NAMES[hint]


def _iterate_broken_rules(value: Any, kind: Any) -> Iterator[str]:
    """Yield a description of each bound that a value breaks. Its type fits."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        if _fits(value, arguments[0]) and not _fits(value, kind):
            yield _describe_bounds(value, arguments[1])
        yield from _iterate_broken_rules(value, arguments[0])
    elif origin is tuple and isinstance(value, list):
        for item in value:
            yield from _iterate_broken_rules(item, arguments[0])
    elif origin in (typing.Union, UnionType):
        for other in arguments:
            yield from _iterate_broken_rules(value, other)


def _describe_bounds(value: Any, bounds: msgspec.Meta) -> str:
    if bounds.min_length is not None:
        length = f"{bounds.min_length} and {bounds.max_length}"
        return f"has a length that must lie between {length}" if value else "must not be empty"
    if isinstance(value, float) and not math.isfinite(value):
        return "must be finite"
    is_open = bounds.gt is not None
    low, high = (bounds.gt, bounds.lt) if is_open else (bounds.ge, bounds.le)
    if high in (None, LARGEST):
        return f"must be {'more than' if is_open else 'at least'} {low}"
    return f"must lie between {low} and {high}{', exclusive' if is_open else ''}"


def _describe_given(item: GivenValue) -> str:
    kind = {dict: "table", list: "list", str: "string", bool: "boolean", int: "integer"}
    name = kind.get(type(item.value), type(item.value).__name__)
    return f"{_shorten(item.value)} ({name}) was given."


def _shorten(value: Any) -> str:
    text = {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _format_report(path: str | Path, problems: list[str]) -> str:
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    head = f"The configuration {str(path)!r} is not valid ({count})."
    return "\n\n".join([head, format_lines(problems), "Nothing was started."])
