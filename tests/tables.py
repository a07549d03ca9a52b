"""How many tests run: a short sample, all, or all with every row of the long tables and fuzzes.

The short run is the one of README: `pytest` without arguments. It leaves out what is marked `slow`
and takes a fixed sample of the rows of each parametrized test. `--all`, or naming files, runs all
but the rows marked `long`; `--long` runs everything.
"""

import collections
import os
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

# Of each parametrized test, in the short run.
ROWS = 2


def sampled(rows: Sequence[Any], ordinary: int, *, name: Callable[[Any], str] = str) -> list[Any]:
    """Parameters for all `rows`, of which all but a fixed sample of `ordinary` are marked `long`.

    The sample depends on the names of the rows only, so a new row does not change the others.
    """
    ranked = sorted(rows, key=lambda row: random.Random(name(row)).random())
    always = {name(row) for row in ranked[:ordinary]}
    return [
        pytest.param(row, id=name(row), marks=() if name(row) in always else pytest.mark.long)
        for row in rows
    ]


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
    by_function: dict[str, list[pytest.Item]] = collections.defaultdict(list)
    for item in kept:
        if item.get_closest_marker("slow") is None:
            by_function[item.nodeid.partition("[")[0]].append(item)
    sample = {
        id(item)
        for rows in by_function.values()
        for item in sorted(rows, key=lambda item: random.Random(item.nodeid).random())[:ROWS]
    }
    return [item for item in kept if id(item) in sample]


def _length() -> str:
    return os.environ.get("JAXDIST_TESTS", "all")
