"""Each `raise` of the package is reached by a test, or listed with the reason why it is not."""

import importlib
import os
import pathlib
import subprocess
import sys
import traceback
from collections.abc import Iterator

import pytest

from tools import raises, record_raises

SMALL = '''"""A module of a small package."""


class Shelf:
    def take(self, number):
        if number < 0:
            raise ValueError("below 0")
        try:
            return self.find(number)
        except KeyError:
            raise
        finally:
            self.last = number

    def find(self, number):
        def fail():
            raise KeyError(number) from None

        match number:
            case 1:
                raise StopIteration
            case 2:
                error = ArithmeticError("two")
                raise error
        if number > 9:
            fail()
        if number > 5:
            raise (ValueError if number == 6 else TypeError)(f"{1 / (number - 7)}")
        return number
'''
BELOW = "shelf.py::Shelf.take::1"
AGAIN = "shelf.py::Shelf.take::2"
INNER = "shelf.py::Shelf.find.fail::1"
STOP = "shelf.py::Shelf.find::1"
VALUE = "shelf.py::Shelf.find::2"
CHOICE = "shelf.py::Shelf.find::3"
CLASSES = {
    BELOW: "ValueError",
    AGAIN: "",
    INNER: "KeyError",
    STOP: "StopIteration",
    VALUE: "error",
    CHOICE: "ValueError if number == 6 else TypeError",
}


def test_the_list_of_the_package_names_raises_that_exist() -> None:
    assert raises.find_wrong_lines(raises.LISTED.read_text(), raises.find(raises.PACKAGE)) == []


@pytest.fixture
def small(tmp_path: pathlib.Path) -> pathlib.Path:
    """A package with one module, whose name no other test uses."""
    package = tmp_path / f"small_{tmp_path.name}".replace("[", "_").replace("]", "_")
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "shelf.py").write_text(SMALL)
    return package


def test_a_raise_is_known_by_its_function_and_its_number_there(small: pathlib.Path) -> None:
    found = raises.find(small)
    assert {key: one.error for key, one in found.items()} == CLASSES
    lines = SMALL.splitlines()
    assert all(lines[one.line - 1].strip().startswith("raise") for one in found.values())


@pytest.fixture
def record(small: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    """The file of the record of the small package, which can be imported."""
    file = small.parent / "out" / "record.txt"
    monkeypatch.syspath_prepend(str(small.parent))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    record_raises.install(small, file)
    yield file
    for name in [name for name in sys.modules if name.partition(".")[0] == small.name]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("number", "kind", "expected"),
    [
        (-1, ValueError, {BELOW: "ValueError"}),
        (0, None, {}),
        (1, StopIteration, {STOP: "StopIteration"}),
        (2, ArithmeticError, {VALUE: "ArithmeticError"}),
        (6, ValueError, {CHOICE: "ValueError"}),
        # The error is never made: it fails before.
        (7, ZeroDivisionError, {}),
        (8, TypeError, {CHOICE: "TypeError"}),
        (10, KeyError, {INNER: "KeyError", AGAIN: "KeyError"}),
    ],
)
def test_what_is_raised_is_recorded_once_with_its_class_and_the_test(
    record: pathlib.Path,
    small: pathlib.Path,
    number: int,
    kind: type[Exception] | None,
    expected: dict[str, str],
) -> None:
    shelf = importlib.import_module(f"{small.name}.shelf").Shelf()
    for _ in range(2):
        if kind is None:
            shelf.take(number)
        else:
            with pytest.raises(kind) as caught:
                shelf.take(number)
            # The line of the traceback is the line of the statement.
            last = traceback.extract_tb(caught.value.__traceback__)[-1]
            assert "raise" in (last.line or "")
            assert len(traceback.extract_tb(caught.value.__traceback__)) <= 4
    reached = raises.read_record(record.read_text())
    assert {key: one.error for key, one in reached.items()} == expected
    assert record.read_text().count("\n") == len(expected)
    test = f"test_what_is_raised_is_recorded_once_with_its_class_and_the_test[{number}-"
    assert all(f"::{test}" in one.test for one in reached.values())


def test_what_is_raised_outside_of_tests_is_not_recorded_until_a_test_raises_it(
    record: pathlib.Path, small: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = importlib.import_module(f"{small.name}.shelf").Shelf()
    with monkeypatch.context() as outside:
        outside.delenv("PYTEST_CURRENT_TEST")
        with pytest.raises(ValueError, match="below 0"):
            shelf.take(-1)
    assert record.read_text() == ""
    with pytest.raises(ValueError, match="below 0"):
        shelf.take(-1)
    assert list(raises.read_record(record.read_text())) == [BELOW]


def test_the_names_of_a_recorded_module_and_its_bytecode_are_as_without(
    record: pathlib.Path, small: pathlib.Path
) -> None:
    module = importlib.import_module(f"{small.name}.shelf")
    assert [name for name in vars(module) if not name.startswith("__")] == ["Shelf"]
    assert module.__doc__ == "A module of a small package."
    assert not list(small.rglob("shelf.*.pyc"))
    assert importlib.import_module(small.name).__path__ == [str(small)]
    assert record.exists()


def test_a_package_that_is_imported_cannot_be_recorded(tmp_path: pathlib.Path) -> None:
    with pytest.raises(RuntimeError, match="jaxdist is already imported"):
        record_raises.install(raises.PACKAGE, tmp_path / "record.txt")


REACHED = {key: raises.Reached("Some", "a.py::test_a[x|y]") for key in [AGAIN, INNER, STOP, VALUE]}
GOOD = f"{BELOW}  ValueError  — needs a TPU\n{CHOICE}  {CLASSES[CHOICE]}  — cannot be 6\n"


@pytest.mark.parametrize(
    ("listed", "faults"),
    [
        (GOOD, []),
        ("", [f"{BELOW} (line 7): no test reaches it", f"{CHOICE} (line 28): no test reaches it"]),
        (GOOD + f"{AGAIN}  raise  — x", [f"{AGAIN} (line 11): a.py::test_a[x|y] reaches it"]),
        (GOOD + "gone.py::f::1  ValueError  — x", ["gone.py::f::1: there is no such `raise`"]),
        (GOOD + GOOD.splitlines()[0], [f"{BELOW}: listed twice"]),
        (
            GOOD.replace("ValueError  —", "TypeError  —"),
            [f"{BELOW}: it raises ValueError, and the "],
        ),
        (GOOD + "\n", [": the form is"]),
        (GOOD + f"{AGAIN}  raise", [f"{AGAIN}  raise: the form is"]),
        (GOOD + f"{AGAIN}  raise  — ", [f"{AGAIN}  raise  — : the form is"]),
    ],
)
def test_each_fault_of_the_list_is_found(
    small: pathlib.Path, listed: str, faults: list[str]
) -> None:
    found = raises.find_faults(listed, raises.find(small), REACHED)
    assert len(found) == len(faults)
    assert all(fault.startswith(start) for fault, start in zip(found, faults, strict=True))


def test_the_table_counts_each_class_and_names_the_test(small: pathlib.Path) -> None:
    lines = raises.make_table(GOOD, raises.find(small), REACHED).splitlines()
    assert lines[2:6] == [
        "| all | 6 | 4 | 2 |",
        "| Some | 4 | 4 | 0 |",
        "| ValueError | 1 | 0 | 1 |",
        f"| {CLASSES[CHOICE]} | 1 | 0 | 1 |",
    ]
    assert f"| Some | {STOP} | a.py::test_a[x\\|y] |" in lines
    assert f"| ValueError | {BELOW} | listed |" in lines


CONFTEST = """
from tools import raises

raises.PACKAGE, raises.LISTED, raises.RECORD = (
    raises.pathlib.Path(__file__).with_name(name) for name in ("small", "listed.txt", "record.txt")
)
pytest_plugins = ["tools.record_raises"]

def pytest_addoption(parser):
    parser.addoption("--all", action="store_true")
    parser.addoption("--long", action="store_true")
"""
TESTS = """
import pytest
from small import shelf

@pytest.mark.parametrize("number", [1, 2, 6, 10])
def test_take(number):
    with pytest.raises((ArithmeticError, KeyError, StopIteration, ValueError)):
        shelf.Shelf().take(number)
"""


def _run_small(
    tmp_path: pathlib.Path, arguments: str, listed: str
) -> subprocess.CompletedProcess[str]:
    (tmp_path / "small").mkdir()
    files = {
        "small/__init__.py": "",
        "small/shelf.py": SMALL,
        "conftest.py": CONFTEST,
        "test_it.py": TESTS,
        "listed.txt": listed,
        "pytest.ini": f"[pytest]\ntestpaths = .\npythonpath = . {raises.PACKAGE.parent}\n",
        # Of an earlier run, which reached everything.
        "record.txt": f"{BELOW}\tValueError\ttest_old.py::test_old\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    ours = {raises.VARIABLE, "PYTEST_CURRENT_TEST", "PYTEST_XDIST_WORKER", "PYTEST_ADDOPTS"}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments.split()],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name not in ours},
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.mark.parametrize(
    ("arguments", "listed", "words"),
    [
        ("--all", f"{BELOW}  ValueError  — needs a TPU\n", []),
        ("--long -n 2", f"{BELOW}  ValueError  — needs a TPU\n", []),
        (
            "--long",
            "",
            [f"{BELOW} (line 7): no test reaches it", f"{BELOW}  ValueError  — REASON"],
        ),
        ("--long -n 2", f"{BELOW}  ValueError  — x\n{AGAIN}  raise  — x\n", [f"{AGAIN} (line 11)"]),
        ("", "", []),
        ("--long test_it.py", "", []),
        ("--long -k take", "", []),
        ("--long --collect-only", "", []),
    ],
    ids=str,
)
def test_a_run_of_all_tests_fails_where_a_raise_is_neither_reached_nor_listed(
    tmp_path: pathlib.Path, arguments: str, listed: str, words: list[str]
) -> None:
    done = _run_small(tmp_path, arguments, listed)
    assert done.returncode == bool(words), done.stdout + done.stderr
    assert all(word in done.stdout for word in words), done.stdout
    assert ("1 failed, 4 passed" in done.stdout) == bool(words)


def test_a_run_without_the_long_rows_names_the_raise_and_passes(tmp_path: pathlib.Path) -> None:
    done = _run_small(tmp_path, "--all", "")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{BELOW} (line 7): no test reaches it" in done.stdout
