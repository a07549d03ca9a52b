"""Write `docs/reference/configuration.md` from the schema of the configurations.

    python -m tools.configuration_page

Types, bounds and defaults come from the dataclasses in `jaxdist/jobs`; what an entry means is in
`configuration_meanings.toml`. A test compares the page with this program.
"""

import dataclasses
import json
import pathlib
import tomllib
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from jaxdist._program import CompilerOptions
from jaxdist.jobs import TASKS, JobConfig

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "reference" / "configuration.md"
MEANINGS = pathlib.Path(__file__).with_name("configuration_meanings.toml")
# A bound above this one guards against slips, and tells a reader nothing.
_LARGE = 2**20 - 1
_CHANGE = {"free": "yes", "knowingly": "`--accept-changes`", "never": "no"}
_PLAIN = {bool: "`true` or `false`", int: "whole number", float: "number", str: "string"}
_HEAD = "| entry | value | default | changes on resume | meaning |\n|---|---|---|---|---|"

_INTRODUCTION = """# Configuration reference

`jaxdist train` and `jaxdist plan` read a TOML file with these entries. An entry that is left out \
has its default. `--set section.key=value` replaces an entry. [Configurations and \
tasks](../how-to/tasks.md) explains how the entries work together.

This page is generated: `python -m tools.configuration_page` writes it from the classes that check \
a configuration, so it has every entry.

The column "changes on resume" says whether a run may continue from a checkpoint after the entry \
was changed: without more words, with the option `--accept-changes`, or not at all.
"""


@dataclasses.dataclass(frozen=True)
class Entry:
    """An entry of a configuration: its section, its field, and its default in one task."""

    section: str
    field: dataclasses.Field[Any]
    kind: Any
    default: Any

    @property
    def name(self) -> str:
        """The name, as for `--set`."""
        return f"{self.section}.{self.field.name}"


def list_entries(config: type[JobConfig]) -> Iterator[Entry]:
    """All entries of the configuration of a task, section by section."""
    values = config()
    for outer in dataclasses.fields(config):
        section = getattr(values, outer.name)
        if dataclasses.is_dataclass(section):
            hints = get_type_hints(type(section), include_extras=True)
            for field in dataclasses.fields(section):
                default = getattr(section, field.name)
                yield Entry(outer.name, field, hints[field.name], default)


def describe_bounds(meta: Any) -> str:
    """The bounds of a number in words, without those that no run comes near."""
    low = (f"above {meta.gt}" if meta.gt is not None else "") or (
        f"at least {meta.ge}" if meta.ge is not None else ""
    )
    high = (f"below {meta.lt}" if meta.lt is not None else "") or (
        f"at most {meta.le}" if meta.le is not None and meta.le < _LARGE else ""
    )
    return " and ".join(part for part in (low, high) if part)


def describe_type(kind: Any) -> str:
    """The values that a type hint of the schema accepts, in words."""
    if kind == CompilerOptions:
        return "any names, each with a bool, a number or a string"
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Literal:
        return ", ".join(f"`{json.dumps(value)}`" for value in parts)
    if origin in (Union, types.UnionType):
        return ", or ".join(describe_type(part) for part in parts)
    if origin is Annotated:
        bounds = ", ".join(filter(None, map(describe_bounds, parts[1:])))
        return ", ".join(filter(None, (describe_type(parts[0]), bounds)))
    if origin is tuple:
        return f"a list of: {describe_type(parts[0])}"
    return _PLAIN[kind]


def _read_meanings() -> dict[str, dict[str, str]]:
    return tomllib.loads(MEANINGS.read_text())


def list_missing_meanings() -> list[str]:
    """Entries without a meaning, and meanings without an entry."""
    meanings = _read_meanings()
    entries = {("shared", e.name) for e in list_entries(JobConfig)}
    for task, kind in TASKS.items():
        own = {e.name for e in list_entries(kind.config_type)}
        entries |= {(task, name) for name in own if ("shared", name) not in entries}
    written = {(part, name) for part, names in meanings.items() for name in names}
    return sorted(f"{part}: {name}" for part, name in entries ^ written)


def _write_row(entry: Entry, meanings: dict[str, str]) -> str:
    change = _CHANGE[entry.field.metadata["change"]]
    only_if = entry.field.metadata["only_if"]
    meaning = meanings[entry.name]
    if only_if is not None:
        meaning += f"; only with `{only_if[0]} = {json.dumps(only_if[1])}`"
    default = json.dumps(entry.default)
    cells = (f"`{entry.name}`", describe_type(entry.kind), f"`{default}`", change, meaning)
    return f"| {' | '.join(cells)} |"


def _write_task(task: str, meanings: dict[str, dict[str, str]]) -> Iterator[str]:
    shared = {e.name: e.default for e in list_entries(JobConfig)}
    entries = list(list_entries(TASKS[task].config_type))
    yield f'## The task `"{task}"`\n'
    own = [e for e in entries if e.name not in shared]
    if own:
        yield "\n".join([_HEAD, *(_write_row(e, meanings[task]) for e in own)]) + "\n"
    other = [e for e in entries if e.name in shared and e.default != shared[e.name]]
    if other:
        listed = ", ".join(f"`{e.name} = {json.dumps(e.default)}`" for e in other)
        yield f"Other defaults than in the table above: {listed}.\n"


def write_page() -> str:
    """The text of the page."""
    meanings = _read_meanings()
    rows = [_write_row(e, meanings["shared"]) for e in list_entries(JobConfig)]
    tasks = ", ".join(f'`"{task}"`' for task in TASKS)
    first = f"Before the sections, `task` is the name of the task: {tasks}.\n"
    parts = [_INTRODUCTION, "## Entries of every task\n", first, "\n".join([_HEAD, *rows]) + "\n"]
    for task in TASKS:
        parts += _write_task(task, meanings)
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(write_page())
