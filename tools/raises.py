"""`python -m tools.raises [FILE]`: every `raise` of the package, and the test that reaches it.

FILE is what a run of the tests recorded; by default the last run of `pytest --all`.

Note [Raises]: a run of all tests records each `raise` statement that it executes
(`tools.record_raises`). At its end (`conftest.py`) each statement must be recorded, or be a line of
`tests/unreached_raises.txt` that gives the reason. Otherwise a run of `--long` fails, and a run of
`--all` names it. To record a part of the
tests, and more parts into the same file, set `JAXDIST_RAISES=FILE`.
"""

import ast
import collections
import dataclasses
import pathlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence

_ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = _ROOT / "jaxdist"
LISTED = _ROOT / "tests" / "unreached_raises.txt"
# The environment variable that names the file of the record, and the file of `pytest --all`.
VARIABLE = "JAXDIST_RAISES"
RECORD = _ROOT / "build" / "raises.txt"

_LINE = re.compile(r"(\S+::\S+::\d+)  (\S.*?)  — (\S.*)")


@dataclasses.dataclass(frozen=True)
class Raise:
    """One `raise` statement. Its key has no line number, which each edit above would change."""

    key: str
    # The class or function that is called; "" where `raise` alone raises what was caught.
    error: str
    line: int


@dataclasses.dataclass(frozen=True)
class Reached:
    """The first time that tests executed a `raise`: the class of the exception, and the test."""

    error: str
    test: str


def _find_class(error: ast.expr) -> ast.expr:
    """The class or function that makes an error; of `refuse` it is the class."""
    if not isinstance(error, ast.Call):
        return error
    # `call_as(name, refuse, ...)` calls it under a name.
    made_by = {x.id for x in (error.func, *error.args[:2]) if isinstance(x, ast.Name)}
    if "refuse_type" in made_by:
        return ast.Name("ArgumentTypeError")
    if "refuse" in made_by:
        kinds = [keyword.value for keyword in error.keywords if keyword.arg == "kind"]
        return kinds[0] if kinds else ast.Name("ArgumentError")
    return error.func


def find_in_tree(tree: ast.Module, file: str) -> dict[ast.Raise, Raise]:
    """The `raise` statements of a module, in the order of the text."""
    found: dict[ast.Raise, Raise] = {}
    count: collections.Counter[str] = collections.Counter()

    def visit(node: ast.AST, scope: tuple[str, ...]) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            scope = (*scope, node.name)
        if isinstance(node, ast.Raise):
            name = f"{file}::{'.'.join(scope) or '<module>'}"
            count[name] += 1
            text = "" if node.exc is None else ast.unparse(_find_class(node.exc))
            found[node] = Raise(f"{name}::{count[name]}", text, node.lineno)
        for child in ast.iter_child_nodes(node):
            visit(child, scope)

    visit(tree, ())
    return found


def find(package: pathlib.Path) -> dict[str, Raise]:
    """The `raise` statements of a package by key, sorted by file."""
    found = (
        one
        for path in sorted(package.rglob("*.py"))
        for one in find_in_tree(
            ast.parse(path.read_text()), path.relative_to(package).as_posix()
        ).values()
    )
    return {one.key: one for one in found}


def read_record(text: str) -> dict[str, Reached]:
    """What `tools.record_raises` wrote; several processes may have written one key."""
    reached: dict[str, Reached] = {}
    for line in text.splitlines():
        key, error, test = line.split("\t", 2)
        reached.setdefault(key, Reached(error, test))
    return reached


def find_wrong_lines(listed: str, raises: Mapping[str, Raise]) -> list[str]:
    """Faults of the list that need no run: wrong form, no such `raise`, another class, twice."""
    faults = []
    keys: set[str] = set()
    for line in listed.splitlines():
        parts = _LINE.fullmatch(line)
        if parts is None:
            faults.append(f"{line}: the form is `file::function::1  Class  — reason`")
            continue
        key, error, _ = parts.groups()
        if key in keys:
            faults.append(f"{key}: listed twice")
        elif key not in raises:
            faults.append(f"{key}: there is no such `raise`; remove the line")
        elif error != _name(raises[key]):
            faults.append(f"{key}: it raises {_name(raises[key])}, and the list says {error}")
        keys.add(key)
    return faults


def find_faults(
    listed: str, raises: Mapping[str, Raise], reached: Mapping[str, Reached]
) -> list[str]:
    """Faults of the list after a run of all tests."""
    faults = find_wrong_lines(listed, raises)
    keys = listed_keys(listed)
    for key, one in raises.items():
        if key in reached and key in keys:
            faults.append(
                f"{key} (line {one.line}): {reached[key].test} reaches it; remove the line"
            )
        elif key not in reached and key not in keys:
            faults.append(
                f"{key} (line {one.line}): no test reaches it; write one, or add the line\n"
                f"    {key}  {_name(one)}  — REASON"
            )
    return faults


def listed_keys(listed: str) -> set[str]:
    """The keys of the list."""
    return {parts[1] for line in listed.splitlines() if (parts := _LINE.fullmatch(line))}


def make_report(faults: Sequence[str]) -> str:
    """What a run that found faults prints."""
    lines = "\n".join(faults)
    return (
        f"{len(faults)} faults of the table of errors.\n\n"
        "A test must reach every `raise` of the package, or tests/unreached_raises.txt gives the "
        f"reason why none can.\n\n{lines}"
    )


def make_table(listed: str, raises: Mapping[str, Raise], reached: Mapping[str, Reached]) -> str:
    """Markdown: one table of the classes of errors, one of the `raise` statements."""
    keys = listed_keys(listed)
    by_class: dict[str, list[str]] = collections.defaultdict(list)
    for key, one in raises.items():
        by_class[reached[key].error if key in reached else _name(one)].append(key)
    lines = ["| class | raises | reached | listed |", "|---|---|---|---|"]
    for error, own in [("all", list(raises)), *sorted(by_class.items())]:
        numbers = (len(own), sum(k in reached for k in own), sum(k in keys for k in own))
        lines.append(f"| {error} | {' | '.join(map(str, numbers))} |")
    lines += ["", "| class | raise | first test |", "|---|---|---|"]
    for error, own in sorted(by_class.items()):
        for key in own:
            listing = "listed" if key in keys else "none"
            test = reached[key].test if key in reached else listing
            lines.append(f"| {error} | {key} | {test.replace('|', chr(92) + '|')} |")
    return "\n".join(lines)


def _name(one: Raise) -> str:
    return one.error or "raise"


def _lines(arguments: Sequence[str]) -> Iterator[str]:
    record = pathlib.Path(arguments[0]) if arguments else RECORD
    if not record.exists():
        sys.exit(f"{record} does not exist: run `pytest --all`, or name the file of a record")
    listed = LISTED.read_text()
    raises, reached = find(PACKAGE), read_record(record.read_text())
    yield make_table(listed, raises, reached)
    if faults := find_faults(listed, raises, reached):
        yield f"\n{make_report(faults)}"


def main() -> None:
    """Print the tables, and what is missing."""
    for lines in _lines(sys.argv[1:]):
        print(lines)


if __name__ == "__main__":
    main()
