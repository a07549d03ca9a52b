"""A tree with a package and its tests: its files, its mutants, and the copy that runs."""

import ast
import atexit
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from tools.mutants import inside, sandbox, weaving
from tools.mutants.sample import THRESHOLD, Mutant, read_trees, sample

RECORD = "tests/records/mutants.tsv"
_OWN_TESTS = "tests/test_mutants"
# With pages, these change hardly anything of what the tests find in a mutant.
_WITHOUT_EFFECT = (_OWN_TESTS, "tests/records/", "tools/mutants/", ".ci/", "Makefile")
# Variables of other runs of tests, and of this machine.
_LEFT_OUT = ("JAXDIST_", "PYTEST_", "HYPOTHESIS_", "TPU_", "XDG_", "TMPDIR", "COLUMNS")
_LEFT_OUT += ("PYTHONDONTWRITEBYTECODE",)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run of pytest ended, and what its tests did."""

    # None where it was stopped.
    status: int | None
    # Of each test, in the order in which they began: its worst outcome.
    outcomes: dict[str, str]
    seconds: dict[str, float]
    output: str
    reached: str

    @property
    def failed(self) -> list[str]:
        """The tests that failed, or were running when the run was stopped or crashed."""
        return [test for test, outcome in self.outcomes.items() if outcome in ("failed", "started")]


@dataclasses.dataclass(frozen=True)
class Project:
    """A tree under git with a package and its tests."""

    root: pathlib.Path
    package: str = "jaxdist"
    threshold: float = THRESHOLD

    @functools.cached_property
    def files(self) -> list[str]:
        """All files that git knows or would add."""
        names = self._git("ls-files", "-z", "--cached", "--others", "--exclude-standard")
        found = sorted(filter(None, names.split("\0")))
        # Not those that were removed, nor links to folders.
        return [name for name in found if (self.root / name).is_file()]

    @functools.cached_property
    def _trees(self) -> dict[str, ast.Module]:
        return read_trees(self.root / self.package)

    @functools.cached_property
    def mutants(self) -> list[Mutant]:
        """The sample."""
        return sample(self._trees, self.threshold)

    @functools.cached_property
    def code(self) -> str:
        """A digest of the files that the results depend on, and of the mutants."""
        digest = hashlib.sha256()
        for name in self.files:
            if self._has_effect(name):
                digest.update(f"{name}\0".encode() + (self.root / name).read_bytes())
        for mutant in self.mutants:
            digest.update(f"{mutant.file}\0{mutant.function}\0{mutant.text}\0".encode())
        return digest.hexdigest()[:12]

    def _git(self, *arguments: str) -> str:
        command = ["git", *arguments]
        done = subprocess.run(command, cwd=self.root, check=True, capture_output=True, text=True)
        return done.stdout

    def _has_effect(self, name: str) -> bool:
        # Neither links to folders nor other folders.
        if not name or (self.root / name).is_dir():
            return False
        return not name.startswith(_WITHOUT_EFFECT) and not name.endswith(".md")

    @property
    def folder(self) -> pathlib.Path:
        """What runs of this code keep."""
        return self.root / "build" / "mutants" / self.code

    @property
    def commit(self) -> str:
        """The commit that is checked out, with a plus sign where files differ from it."""
        status = self._git("status", "--porcelain", "--untracked-files=all", "-z")
        changed = [line[3:] for line in status.split("\0") if self._has_effect(line[3:])]
        return self._git("rev-parse", "HEAD").strip() + ("+" if changed else "")

    def prepare(self) -> pathlib.Path:
        """Return the copy with all mutants, and make it if it does not exist."""
        tree = self.folder / "tree"
        if not tree.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            # Complete or not at all, also with several processes.
            part = pathlib.Path(tempfile.mkdtemp(dir=self.folder))
            trees = read_trees(self.root / self.package)
            mutants = sample(trees, self.threshold)
            # They would run mutants inside of a run of mutants.
            files = [name for name in self.files if not name.startswith(_OWN_TESTS)]
            weaving.make_tree(self.root, files, part, self.package, trees, mutants)
            try:
                part.rename(tree)
            except OSError:
                shutil.rmtree(part)
        weaving.copy_runtime(tree)
        return tree

    @functools.cached_property
    def _warm(self) -> sandbox.Warm:
        tree = self.prepare()
        warm = sandbox.Warm(tree, _make_environment(tree), self.package)
        atexit.register(warm.close)
        return warm

    def run_tests(
        self,
        options: Sequence[str],
        *,
        seconds: float,
        on: int | None = None,
        tests: Sequence[str] | None = None,
        record: bool = False,
        is_warm: bool = False,
    ) -> Outcome:
        """Run pytest in the copy, with a mutant on, with all of the short tests or these.

        A warm run starts where the package is imported, which a mutant must not change.
        """
        tree = self.prepare()
        with tempfile.TemporaryDirectory(prefix="mutants-") as name:
            here = pathlib.Path(name)
            environment = _make_environment(tree)
            environment["JAXDIST_MUTANTS_LOG"] = "/tmp/log.jsonl"
            if on is not None:
                environment["JAXDIST_MUTANT"] = str(on)
            if record:
                environment["JAXDIST_MUTANTS_REACHED"] = "/tmp/reached.txt"
            if tests is not None:
                environment["JAXDIST_MUTANTS_TESTS"] = "/tmp/tests.json"
                (here / "tests.json").write_text(json.dumps(tests))
                functions = dict.fromkeys(test.partition("[")[0] for test in tests)
                options = [*options, *functions]
            # Rewritten assertions would be read from the sources, also those of doctests.
            arguments = ["-p", weaving.PLUGIN, "--assert=plain", "-p", "no:cacheprovider"]
            arguments += ["--hypothesis-seed", "0", *options]
            output = here / "output.txt"
            if is_warm:
                status = self._warm.run(arguments, environment, here, seconds, output)
            else:
                command = [sys.executable, "-m", "pytest", *arguments]
                status = sandbox.run(command, tree, environment, here, seconds, output)
            outcome = _read_outcome(here, status)
            if status == inside.NOT_CONTAINED:
                raise RuntimeError(f"The namespaces could not be made:\n{outcome.output}")
            return outcome


def _make_environment(tree: pathlib.Path) -> dict[str, str]:
    kept = {n: value for n, value in os.environ.items() if not n.startswith(_LEFT_OUT)}
    return {**kept, "PYTHONPATH": str(tree), "HYPOTHESIS_STORAGE_DIRECTORY": "/tmp/hypothesis"}


def _read_outcome(folder: pathlib.Path, status: int | None) -> Outcome:
    outcomes: dict[str, str] = {}
    seconds: dict[str, float] = {}
    for line in _read(folder / "log.jsonl").splitlines():
        try:
            test, phase, outcome, spent = json.loads(line)
        except ValueError:
            continue  # Half a line, of a run that was stopped.
        seconds[test] = seconds.get(test, 0.0) + spent
        before = outcomes.get(test, "started")
        if phase == "begin" or before in ("failed", "skipped"):
            outcomes.setdefault(test, outcome)
        elif outcome != "passed" or phase == "teardown":
            outcomes[test] = outcome
    output, reached = _read(folder / "output.txt"), _read(folder / "reached.txt")
    return Outcome(status, outcomes, seconds, output, reached)


def _read(file: pathlib.Path) -> str:
    return file.read_text(errors="replace") if file.exists() else ""
