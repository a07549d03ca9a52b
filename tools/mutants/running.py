"""Runs the mutants of a part one after the other, and enters each result in the record at once."""

import contextlib
import fcntl
from collections.abc import Callable, Iterator

from tools.mutants import record
from tools.mutants.killing import Alone, Verdict, kill
from tools.mutants.project import RECORD, Project
from tools.mutants.reach import Reach
from tools.mutants.record import Row
from tools.mutants.sample import Mutant
from tools.parts import part_of, read_part


class Record:
    """The record of a project, which several parts may write at the same time."""

    def __init__(self, project: Project) -> None:
        self.project = project
        self._file = project.root / RECORD

    def read(self) -> list[Row]:
        """Return the rows of this code."""
        return [row for row in record.load(self._file) if row.code == self.project.code]

    def find(self, mutant: Mutant) -> Row | None:
        """Return the row of a mutant, of this code or an older one."""
        return record.pair(self.project.mutants, record.load(self._file)).get(mutant.number)

    def list_open(self, part: str) -> list[Mutant]:
        """List the mutants of a part that have no row of this code."""
        done = record.pair(self.project.mutants, self.read())
        number, of = read_part(part)
        return [
            mutant
            for mutant in self.project.mutants
            if mutant.number not in done
            and part_of(f"{mutant.function} {mutant.body} {mutant.file}", of) == number
        ]

    def enter(self, mutant: Mutant, verdict: Verdict) -> None:
        """Write the row of a mutant in place of an older one."""
        new = Row(
            function=mutant.function,
            body=mutant.body,
            file=mutant.file,
            mutation=mutant.text,
            result=verdict.result,
            test=verdict.test,
            tests=verdict.tests,
            code=self.project.code,
            commit=self.project.commit,
        )
        with self._locked():
            rows = record.load(self._file)
            old = record.pair(self.project.mutants, rows).get(mutant.number)
            record.save(self._file, [*(row for row in rows if row is not old), new])

    def remove_killed_by(self, tests: set[str]) -> None:
        """Remove the rows of this code that these tests have killed."""
        if tests:
            self._keep(lambda row: row.code != self.project.code or row.test not in tests)

    def finish(self) -> None:
        """Remove rows of older code, when all mutants have one of this."""
        if not self.list_open("1/1"):
            self._keep(lambda row: row.code == self.project.code)

    def _keep(self, is_kept: Callable[[Row], bool]) -> None:
        with self._locked():
            record.save(self._file, filter(is_kept, record.load(self._file)))

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with (self.project.folder / "record.lock").open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def run_part(kept: Record, reach: Reach, part: str) -> Iterator[tuple[Mutant, Verdict]]:
    """Run the mutants of a part that have no row, and yield each result.

    In the end the killing tests run once without a mutant. Where one fails, it has not killed
    anything, and its mutants run again without it.
    """
    project = kept.project
    alone = Alone(project.folder)
    while mutants := kept.list_open(part):
        for mutant in mutants:
            before = kept.find(mutant)
            first = "" if before is None else before.test
            verdict = kill(project, reach, mutant.number, first, alone.failed)
            kept.enter(mutant, verdict)
            yield mutant, verdict
        killers = {row.test for row in kept.read() if row.result == "killed"}
        kept.remove_killed_by(alone.find_failing(project, reach, killers))
    kept.finish()
