"""A plugin of pytest that runs one part of the tests, and goes on where an earlier run stopped.

`--part 2/8` keeps the tests whose node ids hash to the second of eight parts, so a new test moves
no other one. Each test that passes or skips is noted in a file under `build/parts` at once; the
next run of this part leaves it out. The file belongs to the code that was run (commit and changes
that are not committed), the versions of Python and JAX, and the seed of Hypothesis: where one of
them differs, the part starts anew.

When all tests of a part of the long run have passed, one line in `tests/records/long.tsv` says so.
Parts of a working tree with changes that are not committed are not recorded: nobody else has it.
"""

import collections
import datetime
import fcntl
import hashlib
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import subprocess
from collections.abc import Mapping
from typing import IO, Any

import pytest

RECORDS = "tests/records/long.tsv"
COLUMNS = (
    "tests",
    "part",
    "of",
    "python",
    "jax",
    "seed",
    "commit",
    "date",
    "passed",
    "skipped",
    "failed_before",
)
# A line with the same values here replaces the older one.
_KEY = COLUMNS[:5]
_SENT = "part_of_long_run"


def part_of(nodeid: str, of: int) -> int:
    """Return the part of a test, from 1 to `of`; it depends on nothing but these two."""
    return int.from_bytes(hashlib.sha256(nodeid.encode()).digest()[:8], "big") % of + 1


def read_part(text: str) -> tuple[int, int]:
    """Read `2/8`."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise pytest.UsageError(
            f"--part was given {text!r}, not a part: pass K/N with K from 1 to N, as in 2/8."
        )
    return int(match[1]), int(match[2])


def read_records(text: str) -> list[dict[str, str]]:
    """Read the lines of `tests/records/long.tsv`."""
    head, *lines = text.splitlines() or [""]
    if head.split("\t") != list(COLUMNS):
        raise ValueError(f"The first line is {head!r}, and names other columns than {COLUMNS}.")
    return [dict(zip(COLUMNS, line.split("\t"), strict=True)) for line in lines]


def add_record(text: str, record: Mapping[str, object]) -> str:
    """Add one line, or replace the one of the same part; the lines are sorted."""
    new = {name: str(record[name]) for name in COLUMNS}
    old = read_records(text) if text else []
    kept = [line for line in old if any(line[name] != new[name] for name in _KEY)]
    rows = sorted([*kept, new], key=_order)
    return "".join("\t".join(row) + "\n" for row in [COLUMNS, *(r.values() for r in rows)])


def _order(record: Mapping[str, str]) -> tuple[object, ...]:
    return record["tests"], int(record["of"]), int(record["part"]), record["python"], record["jax"]


class Notes:
    """The outcomes of a part, in a file that is appended to after each test."""

    def __init__(self, file: pathlib.Path) -> None:
        self.file = file
        self.passed: dict[str, str] = {}
        self.failed: set[str] = set()

    def read(self, size: int | None = None) -> int:
        """Read the file, or its first `size` bytes, and return how many bytes were read."""
        data = self.file.read_bytes()[:size] if self.file.exists() else b""
        # A run that was killed may have left half a line.
        data = data[: data.rfind(b"\n") + 1]
        for line in data.splitlines():
            self.enter(*json.loads(line))
        return len(data)

    def enter(self, nodeid: str, outcome: str) -> None:
        """A test that failed and passed later counts in both."""
        if outcome == "failed":
            self.failed.add(nodeid)
        else:
            self.passed[nodeid] = outcome


class _Part:
    """What the controlling process and the processes of xdist share: which tests are left."""

    def __init__(self, text: str, notes: Notes) -> None:
        self.text = text
        self.part, self.of = read_part(text)
        self.notes = notes
        self.before = dict(notes.passed)
        self.found = -1

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Leave out the tests of other parts, and those that have passed."""
        own = [item for item in items if part_of(item.nodeid, self.of) == self.part]
        self.found = len(own)
        kept = [item for item in own if item.nodeid not in self.before]
        left = set(map(id, kept))
        config.hook.pytest_deselected(items=[item for item in items if id(item) not in left])
        items[:] = kept


class _PartOfWorker(_Part):
    """In a process of xdist, which collects the tests."""

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        getattr(session.config, "workeroutput", {})[_SENT] = self.found


class _PartOfRun(_Part):
    """In the controlling process, which gets all reports."""

    def __init__(self, text: str, config: pytest.Config) -> None:
        self.config = config
        root = config.rootpath
        given = config.args if config.args_source is pytest.Config.ArgsSource.ARGS else []
        self.tests = " ".join(sorted(given)) or "all"
        self.commit, changes = find_code(root)
        self.is_changed = bool(changes)
        self.seed = str(config.getoption("hypothesis_seed", None) or "random")
        self.versions = {"python": platform.python_version(), "jax": _version("jax")}
        of_all = [text, self.tests, self.commit, changes, self.seed, *self.versions.values()]
        name = hashlib.sha256("\0".join(of_all).encode()).hexdigest()[:16]
        notes = Notes(root / "build" / "parts" / f"{text.replace('/', '-of-')}-{name}.jsonl")
        self.file = _lock(notes.file)
        self.size = notes.read()
        os.ftruncate(self.file.fileno(), self.size)
        super().__init__(text, notes)
        self._phases: dict[str, list[str]] = collections.defaultdict(list)

    def pytest_report_header(self) -> str:
        return (
            f"part {self.text} at commit {self.commit[:12]}"
            f"{', with changes that are not committed' if self.is_changed else ''}: "
            f"{len(self.before)} of its tests have passed before ({self.notes.file})"
        )

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """All processes of xdist leave out the same tests, whenever they start."""
        node.workerinput[_SENT] = (self.text, str(self.notes.file), self.size)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.found = max(self.found, getattr(node, "workeroutput", {}).get(_SENT, -1))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the outcome of a test after its last phase, so that kill -9 loses no earlier one."""
        phases = self._phases[report.nodeid]
        phases.append(report.outcome)
        if report.outcome == "failed":
            self._note(report.nodeid, "failed")
        elif report.when == "teardown" and "failed" not in phases:
            self._note(report.nodeid, "skipped" if "skipped" in phases else "passed")
        if report.when == "teardown":
            del self._phases[report.nodeid]

    def _note(self, nodeid: str, outcome: str) -> None:
        self.notes.enter(nodeid, outcome)
        self.file.write(json.dumps([nodeid, outcome]).encode() + b"\n")
        self.file.flush()

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Record a part all of whose tests have passed, now or before."""
        is_green = session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
        if not is_green or len(self.notes.passed) != self.found or self._is_narrowed():
            return
        session.exitstatus = pytest.ExitCode.OK
        if not self.is_changed:
            file = self.config.rootpath / RECORDS
            with _lock(self.notes.file.with_name("records.lock"), wait=True):
                file.parent.mkdir(parents=True, exist_ok=True)
                text = file.read_text() if file.exists() else ""
                file.write_text(add_record(text, self._record()))

    def _is_narrowed(self) -> bool:
        option = self.config.option
        return bool(option.keyword or option.markexpr or option.deselect or option.collectonly)

    def _record(self) -> dict[str, object]:
        counts = collections.Counter(self.notes.passed.values())
        return {
            "tests": self.tests,
            "part": self.part,
            "of": self.of,
            "seed": self.seed,
            "commit": self.commit,
            "date": datetime.date.today().isoformat(),
            "passed": counts["passed"],
            "skipped": counts["skipped"],
            "failed_before": len(self.notes.failed & self.notes.passed.keys()),
            **self.versions,
        }


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option; `make test-long PART=2/8` passes it."""
    parser.addoption("--part", metavar="K/N", help="run part K of N of --long, and go on with it")


def pytest_configure(config: pytest.Config) -> None:
    """Register what does the work, where a part is wanted."""
    sent = getattr(config, "workerinput", {}).get(_SENT)
    if sent is not None:
        text, file, size = sent
        notes = Notes(pathlib.Path(file))
        notes.read(size)
        config.pluginmanager.register(_PartOfWorker(text, notes))
        return
    text = config.getoption("--part")
    if text is None or hasattr(config, "workerinput"):
        return
    read_part(text)
    if not config.getoption("--long"):
        raise pytest.UsageError("--part is for the long run: pass --long too.")
    config.pluginmanager.register(_PartOfRun(text, config))


def find_code(root: pathlib.Path) -> tuple[str, str]:
    """Return the commit, and a digest of the changes since then; records do not count."""
    but = ["--", ".", f":!{pathlib.Path(RECORDS).parent}"]
    commit = _git(root, "log", "-1", "--format=%H", *but).strip()
    changes = _git(root, "diff", "HEAD", "--binary", *but)
    new = _git(root, "ls-files", "--others", "--exclude-standard", "-z", *but)
    for name in filter(None, new.split("\0")):
        digest = hashlib.sha256((root / name).read_bytes()).hexdigest()
        changes += f"{name}\0{digest}\0"
    return commit, changes and hashlib.sha256(changes.encode()).hexdigest()


def _git(root: pathlib.Path, *args: str) -> str:
    done = subprocess.run(["git", *args], cwd=root, capture_output=True, text=True)
    if done.returncode:
        raise pytest.UsageError(f"--part needs the commit, and git says: {done.stderr.strip()}")
    return done.stdout


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _lock(file: pathlib.Path, *, wait: bool = False) -> IO[bytes]:
    file.parent.mkdir(parents=True, exist_ok=True)
    opened = file.open("ab")
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        raise pytest.UsageError(f"Another run of this part is at work: {file} is locked.") from None
    return opened
