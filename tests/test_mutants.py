"""Mutants: which changes there are, a sample that stays as it is, and what a run says of tests."""

import ast
import copy
import dataclasses
import functools
import os
import pathlib
import subprocess
import sys
import textwrap

import hypothesis
import hypothesis.strategies as st
import pytest

from tools.mutants import __main__ as command_line
from tools.mutants import comparison, record, sample, sandbox, weaving
from tools.mutants.choosing import choose_tests, take_turns
from tools.mutants.killing import kill_again
from tools.mutants.mutations import Function, list_mutations
from tools.mutants.project import RECORD, Project
from tools.mutants.reach import Reach
from tools.mutants.record import Row

in_namespaces = pytest.mark.skipif(
    not sandbox.is_available(), reason="this machine does not allow namespaces"
)


def _parse_function(source: str) -> Function:
    (function,) = ast.parse(source).body
    assert isinstance(function, ast.FunctionDef)
    return function


def _list_changed(body: str) -> list[tuple[str, str]]:
    """The kind of each change of a function with this body, and the body after it."""
    function = _parse_function("def f(a, b):\n" + textwrap.indent(body, "    "))
    found = []
    for mutation in list_mutations(function):
        changed = ast.Module(mutation.apply(function.body), [])
        whole = copy.copy(function)
        whole.body = list(changed.body)
        compile(ast.Module([whole], []), "", "exec")
        found.append((mutation.kind, ast.unparse(changed)))
    return found


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("a < b", [("comparison", "a <= b")]),
        ("a >= b", [("comparison", "a > b")]),
        ("a == b", [("comparison", "a != b")]),
        ("a in b", [("comparison", "a not in b")]),
        ("a is None", [("comparison", "a is not None")]),
        ("a < b > a", [("comparison", "a <= b > a"), ("comparison", "a < b >= a")]),
        ("a and b", [("and, or", "a or b")]),
        ("not a", [("not", "a")]),
        ("a[1]", [("constant", "a[2]")]),
        ("a[1000]", []),
        ("a = True", [("constant", "a = False")]),
        ("a + b", [("arithmetic", "a - b")]),
        ("a / b", [("arithmetic", "a * b")]),
        ("a // b", [("arithmetic", "a * b")]),
        ("a + 'b' + b", []),
        ("a = min(a, b)", [("min, max", "a = max(a, b)")]),
        ("a = b.maximum(a)", [("min, max", "a = b.minimum(a)")]),
        ("a()", [("dropped", "pass")]),
        ("a += b", [("dropped", "pass")]),
        ("if a:\n    raise b", [("never raised", "if False:\n    raise b")]),
        ("return a", [("return", "return None")]),
        ("return None", []),
        ("return", []),
        # Text of errors, annotations, docstrings, and what belongs to an inner function.
        ("raise ValueError(f'{a + 1}', a + b)", []),
        ("a = f'{a + b}'", []),
        ("a: tuple[1, 2] = b", []),
        ("'''A docstring.'''", []),
        ("def inner(c=a + b):\n    return a + c", []),
        ("class Inner:\n    c = a + b", []),
        ("a = lambda c=1: a < c", [("comparison", "a = lambda c=1: a <= c")]),
    ],
)
def test_each_kind_of_change_gives_a_body_that_compiles(
    body: str, expected: list[tuple[str, str]]
) -> None:
    assert _list_changed(body) == expected


def test_a_change_is_described_with_its_distance_from_the_first_line() -> None:
    function = _parse_function(
        "def f(a):\n\n    g(a)\n    if a < 1:\n        raise a\n    return -a"
    )
    assert [one.describe(function.lineno) for one in list_mutations(function)] == [
        "`g(a)` dropped at line +2",
        "`if a < 1: raise` never raises at line +3",
        "`a < 1` → `a <= 1` at line +3",
        "`1` → `2` at line +3",
        "`return -a` → `return None` at line +5",
    ]


NAMES = st.lists(st.integers(0, 400).map("f{}".format), unique=True, max_size=40)
BODY = "def {}(a):\n    if a < 1:\n        a += 2\n    return a + 3\n"


def _choose(names: list[str], file: str = "a.py", body: str = BODY) -> dict[str, str]:
    tree = ast.parse("".join(map(body.format, names)))
    return {one.function: one.text for one in sample.sample({file: tree}, 0.3)}


@hypothesis.given(NAMES, NAMES)
def test_functions_keep_their_mutants_when_others_come_and_go_or_they_move(
    some: list[str], others: list[str]
) -> None:
    both = _choose(list(dict.fromkeys([*others, *some])), "moved.py")
    alone = _choose(some)
    assert alone == {name: text for name, text in both.items() if name in some}


def test_a_fixed_share_of_functions_is_in_the_sample() -> None:
    assert 0.25 < len(_choose([f"f{i}" for i in range(1000)])) / 1000 < 0.35


def test_an_edit_elsewhere_in_a_function_keeps_most_changes() -> None:
    names = [f"f{i}" for i in range(300)]
    before = _choose(names)
    after = _choose(
        names, body=BODY.replace("    return", "    if a > 7:\n        a -= 8\n    return")
    )
    assert before.keys() == after.keys()
    # All have the same distance from the first line, but for the last statement.
    kept = [
        name for name in before if before[name].split(" at ")[0] == after[name].split(" at ")[0]
    ]
    assert 0.4 < len(kept) / len(before) < 1
    assert len(set(before.values())) > 5


def test_functions_of_one_name_are_told_apart_by_body_and_file() -> None:
    trees = {
        "a.py": ast.parse("def f(a):\n    return a + 1\n"),
        "b.py": ast.parse("def f(a):\n    return a - 5\n"),
    }
    mutants = sample.sample(trees, 1.0)
    rows = [_row(mutant.function, body=mutant.body, file="old.py") for mutant in mutants]
    assert record.pair(mutants, rows[::-1]) == {0: rows[0], 1: rows[1]}
    # Both are edited: the files tell.
    rows = [_row(one.function, body="other", file=one.file) for one in mutants]
    assert record.pair(mutants, rows[::-1]) == {0: rows[0], 1: rows[1]}
    assert record.pair(mutants, [_row("g")]) == {}


WOVEN = '''
"""A module."""
from __future__ import annotations

COUNT = 1

class Base:
    def get(self) -> int:
        """A docstring."""
        return 10

class Shelf(Base):
    def get(self) -> int:
        return super().get() + self.__own()

    def __own(self) -> int:
        return 5

    def walk(self):
        for i in range(3):
            yield i

def count() -> int:
    global COUNT
    COUNT += 1
    return COUNT

def outer(a):
    total = a
    def inner():
        nonlocal total
        total += 1
        return total
    inner()
    return total, inner()

async def later():
    return 4

def kind(a):
    try:
        if a > 3:
            return "large"
        elif a < 0:
            raise ValueError(a)
    except ValueError:
        return "negative"
    match a:
        case 1:
            return "one"
    return "other"
'''
ASK = """
import asyncio, shelf
made = shelf.Shelf()
print(made.get(), list(made.walk()), shelf.count(), shelf.outer(5), asyncio.run(shelf.later()))
print(*map(shelf.kind, (-1, 0, 1, 2, 3, 4)), shelf.__doc__, shelf.Base.get.__doc__)
"""


def _ask(tree: pathlib.Path, **variables: str) -> str:
    command = [sys.executable, "-S", "-c", ASK]
    environment = {"PYTHONPATH": str(tree), **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    return done.stdout + done.stderr.strip().rpartition("\n")[2]


def test_a_woven_module_is_as_before_until_a_mutant_is_on(tmp_path: pathlib.Path) -> None:
    root, tree = tmp_path / "root", tmp_path / "tree"
    root.mkdir()
    (root / "shelf.py").write_text(WOVEN)
    before = _ask(root)
    assert before.startswith("15 [0, 1, 2] 2 (6, 7) 4\nnegative other one other other large")
    trees = sample.read_trees(root)
    mutants = sample.sample(trees, 1.0)
    weaving.make_tree(root, ["shelf.py"], tree, ".", trees, mutants)
    assert (tree / "shelf.py").read_text() == WOVEN
    reached = tmp_path / "reached.txt"
    test = {"PYTEST_CURRENT_TEST": "a.py::test_a[x (y)] (call)"}
    assert _ask(tree, JAXDIST_MUTANTS_REACHED=str(reached), **test) == before
    lines = reached.read_text().splitlines()
    assert len(set(lines)) == len(lines)
    assert {line.split("\t")[1] for line in lines} == {"a.py::test_a[x (y)]"}
    assert {int(line.split("\t")[0]) for line in lines} == {one.number for one in mutants}
    different = [m.text for m in mutants if _ask(tree, JAXDIST_MUTANT=str(m.number)) == before]
    assert different == []


@pytest.mark.slow
def test_the_package_with_all_mutants_can_be_imported(tmp_path: pathlib.Path) -> None:
    project = Project(pathlib.Path(command_line.ROOT))
    trees = sample.read_trees(project.root / project.package)
    mutants = sample.sample(trees)
    assert 200 < len(mutants) < 400
    for name, tree in trees.items():
        if own := [one for one in mutants if one.file == name]:
            weaving.weave(tree, own)
            compile(tree, name, "exec", dont_inherit=True)


PACKAGE = {
    "pytest.ini": "[pytest]\ntestpaths = tests\n",
    ".gitignore": "build/\n__pycache__/\n",
    "small/__init__.py": "",
    "small/shelf.py": (
        "def double(a):\n    return a * 2\n\n\ndef triple(a):\n    return a * 3\n\n\n"
        "def never(a):\n    return a\n"
    ),
    "tests/test_shelf.py": (
        "from small import shelf\n\n\ndef test_double():\n    assert shelf.double(2) == 4\n"
    ),
    "tests/test_triple.py": (
        "from small import shelf\n\n\ndef test_triple():\n    shelf.triple(2)\n\n\n"
        "def test_fails():\n    assert shelf.triple(2) == 5\n"
    ),
}


@pytest.fixture
def small(tmp_path: pathlib.Path) -> Project:
    """A package with a function that is tested, one that is only called, and one without tests."""
    for name, text in PACKAGE.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    _commit(tmp_path)
    return Project(tmp_path, "small", 1.0)


def _commit(root: pathlib.Path) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    for arguments in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "a"]):
        subprocess.run(["git", *who, *arguments], cwd=root, check=True, capture_output=True)


def _read_results(root: pathlib.Path) -> dict[str, tuple[str, str]]:
    return {row.function: (row.result, row.test) for row in record.load(root / RECORD)}


def _kill_again(project: Project, function: str, test: str) -> bool:
    (row,) = (one for one in record.load(project.root / RECORD) if one.function == function)
    (mutant,) = (one for one in project.mutants if one.function == function)
    return kill_again(project, mutant, dataclasses.replace(row, test=test))


@in_namespaces
def test_a_tested_function_is_killed_and_others_survive_or_are_unreached(
    small: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = [
        command_line.main(["--part", part, "--processes", "0"], small)
        for part in ("1/2", "2/2", "1/1")
    ]
    assert parts == [0, 0, 0]
    assert _read_results(small.root) == {
        "double": ("killed", "tests/test_shelf.py::test_double"),
        "triple": ("survived", ""),
        "never": ("unreached", ""),
    }
    output = capsys.readouterr().out
    assert "fail without a mutant: tests/test_triple.py::test_fails" in output
    assert output.count("mutants to run") == 3
    assert ": 0 mutants to run" in output.rpartition("code ")[2]
    assert "3 mutants: 1 killed, 1 survived, 1 unreached, 0 not run yet; 33.3 %" in output
    # The test of the record, a test that does not exist any more, and one that notices nothing.
    kill_it = functools.partial(_kill_again, small)
    assert kill_it("double", "tests/test_shelf.py::test_double")
    assert kill_it("double", "tests/test_shelf.py::test_old")
    assert not kill_it("triple", "tests/test_triple.py::test_triple")
    # A test goes, and the first record is in the commit.
    _commit(small.root)
    (small.root / "tests/test_shelf.py").write_text("def test_double():\n    pass\n")
    (small.root / "small/shelf.py").write_text(PACKAGE["small/shelf.py"].partition("def never")[0])
    later = Project(small.root, "small", 1.0)
    assert command_line.main(["--against", "HEAD", "--processes", "0"], later) == 1
    output = capsys.readouterr().out
    assert "LOST: shelf.py: double" in output
    assert "gone: shelf.py: never, which was unreached" in output
    assert {row.commit[-1] for row in record.load(small.root / RECORD)} == {"+"}


@in_namespaces
def test_a_mutant_that_does_not_end_is_stopped_with_all_its_processes(
    tmp_path: pathlib.Path,
) -> None:
    program = "import os, sys\nos.fork()\nos.setsid()\nopen('/tmp/begun', 'w')\nwhile True: pass"
    command = [sys.executable, "-c", program]
    output = tmp_path / "output.txt"
    assert sandbox.run(command, tmp_path, dict(os.environ), tmp_path, 1.5, output) is None
    assert (tmp_path / "begun").exists()
    own = [
        line
        for line in pathlib.Path("/proc").glob("[0-9]*/cmdline")
        if program.encode() in _read_bytes(line)
    ]
    assert own == []


def _read_bytes(file: pathlib.Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""


@in_namespaces
def test_a_mutant_writes_in_its_own_folder_only_and_has_no_network(tmp_path: pathlib.Path) -> None:
    outside, inside = tmp_path / "outside", tmp_path / "inside"
    outside.mkdir()
    inside.mkdir()
    program = f"""
import os, socket
open('/tmp/new', 'w')
for path in {[str(outside / "new"), "/etc/new", os.path.expanduser("~/new")]}:
    try:
        open(path, 'w')
    except OSError:
        print('refused')
print(*os.listdir('/sys/class/net'), *[name for _, name in socket.if_nameindex()])
socket.create_server(('127.0.0.1', 0))
"""
    command, output = [sys.executable, "-c", program], tmp_path / "output.txt"
    assert sandbox.run(command, outside, dict(os.environ), inside, 30, output) == 0
    text = output.read_text()
    assert text.count("refused") == 3
    assert text.split()[-1] == "lo"
    assert "new" in os.listdir(inside)
    assert not (outside / "new").exists()


def test_tests_are_chosen_from_many_files_and_the_earlier_killer_is_first() -> None:
    assert take_turns(["a::1", "a::2", "b::1", "a::3", "b::2"]) == [
        "a::1",
        "b::1",
        "a::2",
        "b::2",
        "a::3",
    ]
    seconds = {f"{file}::{i}": 1.0 + i for file in "abc" for i in range(30)}
    reach = Reach(seconds, {0: ["a::5", "a::6", "b::1"]}, set(), [])
    assert choose_tests([], reach, 1, "", set()) == []
    chosen = choose_tests([], reach, 0, "c::0", {"a::5"})
    assert chosen[:3] == ["c::0", "b::1", "a::6"]
    # Others of the same files follow, as long as the time is not used up.
    assert {test[0] for test in chosen[3:]} == {"a", "b"}
    assert sum(seconds[test] for test in chosen) <= 40


def test_a_change_that_imports_execute_also_belongs_to_the_tests_of_its_file_and_room() -> None:
    trees = {
        "_room/x.py": ast.parse("def f(a):\n    return a\n\ndef g(a):\n    return a\n"),
        "_room/y.py": ast.parse("def h(a):\n    return a\n"),
    }
    mutants = sample.sample(trees, 1.0)
    seconds = {"tests/a.py::1": 1.0, "tests/b.py::1": 1.0, "tests/room/test_y.py::1": 2.0}
    reach = Reach(seconds, {0: ["tests/a.py::1"], 1: ["tests/b.py::1"]}, {0, 2}, [])
    assert choose_tests(mutants, reach, 0, "", set()) == list(seconds)
    assert choose_tests(mutants, reach, 1, "", set()) == ["tests/b.py::1"]
    assert choose_tests(mutants, reach, 2, "", set()) == ["tests/room/test_y.py::1"]


def _row(function: str, result: str = "killed", **fields: str) -> Row:
    values = {"body": "b", "file": "a.py", "mutation": "`1` → `2` at line +1", "test": "t.py::t"}
    return Row(
        function,
        **{**values, "tests": "1 of 1", "code": "c", "commit": "e", **fields, "result": result},
    )


def test_a_record_comes_back_as_it_was_and_another_table_is_refused() -> None:
    rows = [_row("b", test="t.py::t[a\tb\n\x0b]"), _row("a", "survived")]
    text = record.write_rows(rows)
    clean = dataclasses.replace(rows[0], test="t.py::t[a b \x0b]")
    assert record.read_rows(text) == [rows[1], clean]
    assert record.write_rows(record.read_rows(text)) == text
    with pytest.raises(ValueError, match="names other columns"):
        record.read_rows("function\tresult\n")


@pytest.mark.parametrize(
    ("now", "is_good", "words"),
    [
        (["killed", "killed", "survived"], True, ["66.7 %, now: 66.7 %"]),
        (
            ["killed", "survived", "killed"],
            False,
            ["LOST: a.py: f1", "is survived", "t.py::t killed"],
        ),
        (["unreached", "killed", "killed"], False, ["LOST: a.py: f0", "is unreached"]),
        (["killed"], True, ["1 mutants that were killed are not run yet"]),
        (["killed", "killed", *["survived"] * 8], False, ["FEWER", "now: 20.0 %"]),
    ],
)
def test_a_function_that_was_killed_is_killed_and_the_total_stays(
    now: list[str], is_good: bool, words: list[str]
) -> None:
    names = [f"f{i}" for i in range(len(now))] + ["f1", "f2"][len(now) - 1 : 2]
    mutants = sample.sample({"a.py": ast.parse("".join(map(BODY.format, names)))}, 1.0)
    before = [_row("f0"), _row("f1"), _row("f2", "survived"), _row("old")]
    before[3] = _row("old", "survived") if len(now) == 3 else before[3]
    before = before[:3] if len(now) < 9 else before
    found = comparison.compare(mutants, before, [_row(f"f{i}", r) for i, r in enumerate(now)])
    assert found.is_good == is_good
    assert all(word in found.write() for word in words), found.write()
