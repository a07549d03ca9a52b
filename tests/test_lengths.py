"""The short run leaves out what it is told to, and nothing that is not there any more."""

import ast
import functools
import pathlib
import types
from typing import Any

import pytest

from tests import tables
from tools import slow_tests

ROOT = pathlib.Path(__file__).parents[1]


def _is_there(line: str) -> bool:
    file, _, function = line.partition("::")
    if not (ROOT / file).exists():
        return False
    # A doctest, or the class of a test, is not looked for.
    return not file.startswith("tests/") or function in _list_functions(file)


@functools.cache
def _list_functions(file: str) -> frozenset[str]:
    tree = ast.walk(ast.parse((ROOT / file).read_text()))
    return frozenset(n.name for n in tree if isinstance(n, ast.FunctionDef))


@pytest.mark.parametrize("file", [slow_tests.FILE, slow_tests.LATER], ids=lambda file: file.stem)
def test_every_function_in_the_list_is_there(file: pathlib.Path) -> None:
    gone = [line for line in file.read_text().split() if not _is_there(line)]
    assert gone == [], "run `python -m tools.slow_tests` on the log of a new run"


def test_slow_functions_are_read_from_what_pytest_prints() -> None:
    log = (
        "1.20s call     tests/a.py::test_slow[x - 1]\n"
        "0.50s setup    tests/a.py::test_both\n0.50s call     tests/a.py::test_both\n"
        "0.30s call     tests/a.py::test_quick[x]\n0.70s call     tests/a.py::test_quick[y]\n"
    )
    assert slow_tests.slow_functions(log) == ["tests/a.py::test_both", "tests/a.py::test_slow"]


def _item(nodeid: str, *marks: str) -> Any:
    return types.SimpleNamespace(
        nodeid=nodeid, get_closest_marker=lambda name: name if name in marks else None
    )


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        ("long", ["a[0]", "a[1]", "a[2]", "a[3]", "b", "c2", "e", "d"]),
        ("all", ["a[0]", "a[1]", "a[2]", "a[3]", "b", "c2", "e"]),
        ("short", ["b"]),
        ("rest", ["c2", "e"]),
    ],
)
def test_each_length_of_a_run_has_its_tests(
    monkeypatch: pytest.MonkeyPatch, length: str, expected: list[str]
) -> None:
    monkeypatch.setenv("JAXDIST_TESTS", length)
    monkeypatch.setattr(tables, "_LATER", frozenset(["e"]))
    items = [*(_item(f"a[{i}]") for i in range(4)), _item("b"), _item("c2", "slow"), _item("e")]
    kept = [item.nodeid for item in tables.chosen([*items, _item("d", "long")])]
    if length in ("short", "rest"):
        left = {"short": tables.ROWS, "rest": 4 - tables.ROWS}
        assert len([n for n in kept if n.startswith("a[")]) == left[length]
        kept = [n for n in kept if not n.startswith("a[")]
    assert kept == expected
    assert tables.examples(50, long=400) == {"long": 400, "short": 10}.get(length, 50)
    assert len(tables.sampled(range(9), 2)) == (9 if length == "long" else 2)


def test_the_short_run_and_the_rest_are_all_but_rows_of_slow_tests_and_share_what_is_shortened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole, shortened = types.SimpleNamespace(), types.SimpleNamespace(examples=tables.examples)
    items = [_item(f"a[{i}]") for i in range(5)] + [_item("b"), _item("d")]
    slow = [_item(f"e{n}[{i}]", "slow") for n in range(40) for i in range(3)]
    pages = [_item(f"tests/documentation/f[{i}]", "slow") for i in range(tables.SLOW_ROWS + 3)]
    items += slow + pages
    for item in items:
        item.module = shortened if item.nodeid == "d" else whole
    kept: dict[str, list[str]] = {}
    for length in ("all", "short", "rest"):
        monkeypatch.setenv("JAXDIST_TESTS", length)
        kept[length] = [item.nodeid for item in tables.chosen(items)]
    left = set(kept["all"]) - set(kept["short"]) - set(kept["rest"])
    assert left < {item.nodeid for item in slow}
    # Of every fourth slow test one row.
    ran = {item.nodeid.partition("[")[0] for item in slow if item.nodeid in kept["rest"]}
    assert len(left) == len(slow) - tables.SLOW_ROWS * len(ran)
    assert 5 < len(ran) < 20
    assert set(kept["short"]) & set(kept["rest"]) == {"d"}
