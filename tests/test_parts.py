"""The parts of the long run hold every test once, go on after kill -9, and repeat what failed."""

import os
import pathlib
import subprocess
import sys

import hypothesis
import hypothesis.strategies as st
import pytest

from tools import parts

ROOT = pathlib.Path(__file__).parents[1]
CONFTEST = """
import pytest
pytest_plugins = ["tools.parts"]

def pytest_addoption(parser):
    parser.addoption("--long", action="store_true")

@pytest.fixture(autouse=True)
def note(request):
    with open(request.config.rootpath / "ran.log", "a") as log:
        log.write(request.node.name + "\\n")
"""
TESTS = """
import os, pathlib, signal
import pytest

@pytest.mark.parametrize("number", range(8))
def test_number(number):
    here = pathlib.Path(__file__).parent
    if (here / f"kill.{number}").exists():
        (here / f"kill.{number}").unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    assert not (here / f"fail.{number}").exists()

@pytest.mark.skip(reason="to count")
def test_skipped():
    pass
"""


class Project:
    """A folder with nine tests under git."""

    def __init__(self, root: pathlib.Path) -> None:
        self.root = root
        (root / "conftest.py").write_text(CONFTEST)
        (root / "pytest.ini").write_text("[pytest]\n")
        (root / "test_numbers.py").write_text(TESTS)
        (root / ".gitignore").write_text("build/\n__pycache__/\n.*cache/\n*.log\nkill.*\nfail.*\n")
        self.git("init", "-q")
        self.commit()

    def git(self, *args: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
        command = ["git", *who, *args]
        return subprocess.run(
            command, cwd=self.root, check=True, capture_output=True, text=True
        ).stdout

    def commit(self) -> None:
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "-m", "a")

    def run(self, part: str, *args: str) -> tuple[int, list[str], str]:
        """Run a part; return the exit status, which tests ran, and what pytest printed."""
        log = self.root / "ran.log"
        log.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--long"]
        done = subprocess.run(
            [*command, "--part", part, *args],
            cwd=self.root,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        ran = log.read_text().split() if log.exists() else []
        return done.returncode, ran, done.stdout + done.stderr

    def records(self) -> list[dict[str, str]]:
        file = self.root / parts.RECORDS
        return parts.read_records(file.read_text()) if file.exists() else []

    def mark(self, name: str) -> pathlib.Path:
        file = self.root / name
        file.touch()
        return file


@pytest.fixture
def project(tmp_path: pathlib.Path) -> Project:
    return Project(tmp_path)


ALL = [*(f"test_number[{i}]" for i in range(8)), "test_skipped"]


@hypothesis.given(nodeid=st.text(), of=st.integers(1, 50))
def test_each_test_is_in_one_part(nodeid: str, of: int) -> None:
    assert 1 <= parts.part_of(nodeid, of) <= of
    assert parts.part_of(nodeid, of) == parts.part_of(nodeid, of)


def test_parts_have_about_equally_many_tests() -> None:
    counts = [0] * 8
    for i in range(8000):
        counts[parts.part_of(f"tests/test_a.py::test[{i}]", 8) - 1] += 1
    assert min(counts) > 900
    assert max(counts) < 1100


@pytest.mark.parametrize("processes", [0, 2])
def test_the_parts_hold_every_test_once_and_each_is_recorded(
    project: Project, processes: int
) -> None:
    ran = []
    for part in ("1/3", "2/3", "3/3"):
        status, own, output = project.run(part, "-n", str(processes), "--hypothesis-seed", "7")
        assert status == 0, output
        ran += own
    # A test that is marked `skip` sets up no fixture.
    assert sorted(ran) == ALL[:8]
    records = project.records()
    assert [(r["part"], r["of"], r["seed"], r["tests"]) for r in records] == [
        (str(i), "3", "7", "all") for i in (1, 2, 3)
    ]
    assert sum(int(r["passed"]) for r in records) == 8
    assert sum(int(r["skipped"]) for r in records) == 1
    assert {r["commit"] for r in records} == {project.git("rev-parse", "HEAD").strip()}


@pytest.mark.parametrize("kth", [0, 3, 7])
def test_a_run_that_was_killed_goes_on_where_it_was(project: Project, kth: int) -> None:
    project.mark(f"kill.{kth}")
    status, first, _ = project.run("1/1", "-n", "0")
    assert status < 0
    assert project.records() == []
    assert first == ALL[: kth + 1]
    # What was half written when the process ended is not read.
    (notes,) = (project.root / "build" / "parts").glob("*.jsonl")
    with notes.open("a") as file:
        file.write('["test_numbers.py::test_num')
    status, second, output = project.run("1/1", "-n", "0")
    assert status == 0, output
    assert f"{kth} of its tests have passed before" in output
    assert second == ALL[kth:8]
    (record,) = project.records()
    assert (record["passed"], record["skipped"], record["failed_before"]) == ("8", "1", "0")
    assert project.run("1/1", "-n", "0")[:2] == (0, [])


def test_a_test_that_failed_runs_again_and_is_recorded_as_such(project: Project) -> None:
    failing = project.mark("fail.2")
    for expected in (ALL[:8], ["test_number[2]"]):
        status, ran, _ = project.run("1/1", "-n", "2")
        assert (status, sorted(ran)) == (1, expected)
        assert project.records() == []
    failing.unlink()
    assert project.run("1/1", "-n", "2")[:2] == (0, ["test_number[2]"])
    (record,) = project.records()
    assert (record["passed"], record["failed_before"]) == ("8", "1")


def test_another_commit_or_seed_starts_anew_and_a_commit_of_records_does_not(
    project: Project,
) -> None:
    assert len(project.run("1/1", "-n", "0")[1]) == 8
    project.commit()  # The record alone.
    assert project.run("1/1", "-n", "0")[:2] == (0, [])
    assert len(project.run("1/1", "-n", "0", "--hypothesis-seed", "1")[1]) == 8
    (project.root / "other.py").write_text("")
    assert len(project.run("1/1", "-n", "0")[1]) == 8, "a change that is not committed"
    before = project.records()
    project.commit()
    assert len(project.run("1/1", "-n", "0")[1]) == 8
    (record,) = project.records()
    assert record["commit"] != before[0]["commit"], "a line for each part"


def test_what_is_not_a_whole_part_is_not_recorded(project: Project) -> None:
    assert project.run("1/1", "-n", "0", "-k", "3")[:2] == (0, ["test_number[3]"])
    assert (
        project.run("1/1", "-n", "0", "-k", "no_such_test")[0] == pytest.ExitCode.NO_TESTS_COLLECTED
    )
    (project.root / "other.py").write_text("")
    assert project.run("1/1", "-n", "0")[0] == 0, "with a change that is not committed"
    assert project.records() == []
    (project.root / "other.py").unlink()
    assert project.run("1/1", "-n", "0")[:2] == (0, [n for n in ALL[:8] if n != "test_number[3]"])
    assert len(project.records()) == 1


def test_named_tests_have_records_of_their_own(project: Project) -> None:
    assert project.run("1/1", "-n", "0", "test_numbers.py")[0] == 0
    (record,) = project.records()
    assert record["tests"] == "test_numbers.py"
    assert len(project.run("1/1", "-n", "0")[1]) == 8


@pytest.mark.parametrize("part", ["0/8", "9/8", "2", "2/", "-1/8", "2/8/1", "a/b"])
def test_what_is_not_a_part_is_refused(part: str) -> None:
    with pytest.raises(pytest.UsageError, match=r"pass K/N with K from 1 to N"):
        parts.read_part(part)


def test_two_runs_of_one_part_are_refused(project: Project) -> None:
    assert project.run("1/1", "-n", "0")[0] == 0
    (notes,) = (project.root / "build" / "parts").glob("*.jsonl")
    with parts._lock(notes):
        status, ran, output = project.run("1/1", "-n", "0")
    assert (status, ran) == (pytest.ExitCode.USAGE_ERROR, [])
    assert "Another run" in output


def test_a_part_is_for_the_long_run() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "--part", "1/8", "tests/test_parts.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "--part is for the long run" in done.stdout + done.stderr


def test_the_committed_records_can_be_read_and_are_sorted() -> None:
    text = (ROOT / parts.RECORDS).read_text()
    records = parts.read_records(text)
    for record in records:
        assert text == parts.add_record(text, record)
        assert 1 <= int(record["part"]) <= int(record["of"])
        assert len(record["commit"]) == 40
        assert record["passed"].isdecimal()
    assert len({tuple(r.values())[:5] for r in records}) == len(records)
