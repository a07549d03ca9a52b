"""How many tests run: a short sample, all, or all with every row of the long tables and fuzzes.

The short run is the one of README: `pytest` without arguments. It leaves out what is marked `slow`
or is in `slow_tests.txt` or `later_tests.txt`, and takes a fixed sample of the rows of each
parametrized test. `--all`, or naming files, runs all but the long rows; `--rest`, which is for CI,
those of `--all` that the short run leaves out or shortens, of slow tests a fixed row of 22 of 100,
and of those in `later_tests.txt` at most eight rows; `--long` runs everything.
"""

import collections
import functools
import os
import pathlib
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

# Of each parametrized test, in the short run.
ROWS = 2
# Of each slow test that the rest has.
SLOW_ROWS = 1
# Of each test in `later_tests.txt` that the rest has.
LATER_ROWS = 8
# Each row of their tests is a page, a class or a function that users see.
_WHOLE = ("tests/test_documentation.py", "tests/documentation/", "tests/bad_inputs/")
# `python -m tools.slow_tests` writes them.
_SLOW, _LATER = (
    frozenset(pathlib.Path(__file__).with_name(name).read_text().split())
    for name in ("slow_tests.txt", "later_tests.txt")
)


def sampled(rows: Sequence[Any], ordinary: int, *, name: Callable[[Any], str] = str) -> list[Any]:
    """Parameters for a fixed sample of `ordinary` rows; for all `rows` in the long run.

    The sample depends on the names of the rows only, so a new row does not change the others.
    """
    ranked = sorted(rows, key=lambda row: random.Random(name(row)).random())
    # To collect thousands of tests that do not run takes half a minute.
    taken = set(map(name, rows if _length() == "long" else ranked[:ordinary]))
    return [pytest.param(row, id=name(row)) for row in rows if name(row) in taken]


def examples(all: int, long: int | None = None) -> int:
    """How many random examples a test tries: a fifth of `all` in the short run."""
    length = _length()
    if length == "long" and long is not None:
        return long
    return max(all // 5, 3) if length == "short" else all


def chosen(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The tests of this run, in their order."""
    length = _length()
    if length == "long":
        return list(items)
    kept = [item for item in items if item.get_closest_marker("long") is None]
    if length == "all":
        return kept
    sample = _sample(kept)
    if length == "short":
        return [item for item in kept if id(item) in sample]
    left = _only_in_all(kept)
    rest = [item for item in kept if id(item) not in sample or _is_shortened(item)]
    return [item for item in rest if id(item) not in left]


# What the modules of tests with several processes take their helpers from.
_OF_PROCESSES = ("tests.processes.", "tests.launching.launcher", "tests.parameter_server.tasks.")


def with_processes_first(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Put tests that start several processes before the others, else in the same order.

    With `worksteal`, which all but the short run have, pytest-xdist gives each of its workers a
    part of the list. Where all of them start such tests at the same time, the processes of a test
    wait for processors until its time is over.
    """
    if _length() == "short":
        return list(items)
    return sorted(items, key=lambda item: not _starts_processes(getattr(item, "module", None)))


@functools.cache
def _starts_processes(module: Any) -> bool:
    found = (
        (getattr(value, "__module__", None) for value in vars(module).values()) if module else ()
    )
    return any(isinstance(name, str) and name.startswith(_OF_PROCESSES) for name in found)


def _sample(items: Sequence[pytest.Item]) -> set[int]:
    """The `id` of each item of the short run."""
    quick = [i for i in items if not _is_slow(i) and _get_function(i) not in _LATER]
    return {id(item) for rows in _by_function(quick) for item in rows[:ROWS]}


def _only_in_all(items: Sequence[pytest.Item]) -> set[int]:
    """The `id` of each item that only `--all` runs."""
    slow = [item for item in items if _is_slow(item) and not item.nodeid.startswith(_WHOLE)]
    later = [i for i in items if _get_function(i) in _LATER and not _is_slow(i)]
    return {
        id(item)
        for rows in _by_function(slow)
        for item in rows[SLOW_ROWS if _is_taken(_get_function(rows[0])) else 0 :]
    } | {id(item) for rows in _by_function(later) for item in rows[LATER_ROWS:]}


def _is_taken(function: str) -> bool:
    """Whether a slow test is among the 22 of 100 that CI runs; other tests do not change it."""
    return random.Random(function).random() < 0.22


def _by_function(items: Sequence[pytest.Item]) -> list[list[pytest.Item]]:
    """The rows of each function, in a fixed order without meaning."""
    found: dict[str, list[pytest.Item]] = collections.defaultdict(list)
    for item in items:
        found[_get_function(item)].append(item)
    return [
        sorted(rows, key=lambda item: random.Random(item.nodeid).random())
        for rows in found.values()
    ]


def _get_function(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def _is_slow(item: pytest.Item) -> bool:
    return item.get_closest_marker("slow") is not None or _get_function(item) in _SLOW


def _is_shortened(item: pytest.Item) -> bool:
    """Whether the file of a test asks for the number of examples, which the short run lowers."""
    module = getattr(item, "module", None)
    return hasattr(module, "examples") or hasattr(module, "tables")


def _length() -> str:
    return os.environ.get("JAXDIST_TESTS", "all")
