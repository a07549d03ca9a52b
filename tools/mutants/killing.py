"""Runs the tests that reach a mutant, with the mutant on, until one of them fails."""

import dataclasses
import json
import pathlib
from collections.abc import Iterable, Sequence

from tools.mutants.choosing import choose_tests, list_paths_of_room
from tools.mutants.project import Outcome, Project
from tools.mutants.reach import Reach
from tools.mutants.record import Row
from tools.mutants.sample import Mutant

# Most mutants are killed by one of the first tests, so that the other files are not collected.
_FIRST = 6
# Imports, collecting tests, and other work of the machine.
_TO_START = 90.0
# A test that takes so many times longer does not end.
_SLOWER = 5
# Of a test whose duration is not known.
_UNKNOWN_SECONDS = 10.0
# All tests of a room.
_OF_ROOM = 3600.0


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What the tests found: one of `record.RESULTS`, and the test that failed."""

    result: str
    test: str
    # How many tests were chosen, and how many reach the change.
    tests: str


def kill(project: Project, reach: Reach, number: int, first: str, without: set[str]) -> Verdict:
    """Run tests with a mutant on.

    `first` is a test that has killed it before. Tests of `without` are not run.
    """
    tests = choose_tests(project.mutants, reach, number, first, without)
    of = f"{len(tests)} of {len(reach.tests.get(number, []))}"
    for some in filter(None, (tests[:_FIRST], tests[_FIRST:])):
        cheapest_first = sorted(some, key=lambda test: (test != first, reach.seconds[test], test))
        is_warm = number not in reach.imported
        outcome = run_with(project, number, cheapest_first, reach.seconds, is_warm=is_warm)
        if is_killed(outcome):
            return Verdict("killed", name_killer(outcome), of)
    return Verdict("survived" if tests else "unreached", "", of)


def run_with(
    project: Project,
    number: int | None,
    tests: Sequence[str],
    seconds: dict[str, float],
    *,
    is_warm: bool = False,
) -> Outcome:
    """Run these tests until one fails; with no mutant on, all of them."""
    spent = [seconds.get(test, _UNKNOWN_SECONDS) for test in tests]
    limit = 20 + _SLOWER * max(spent)
    options = ["-q", "--timeout", str(round(limit)), *(["-x"] if number is not None else [])]
    most = _TO_START + limit + 2 * sum(spent)
    return project.run_tests(options, seconds=most, on=number, tests=tests, is_warm=is_warm)


def is_killed(outcome: Outcome) -> bool:
    """Return whether a run failed, crashed or was stopped; tests that vanish fail nowhere."""
    return outcome.status != 0 and not has_no_test(outcome)


def has_no_test(outcome: Outcome) -> bool:
    """Return whether pytest found none of the tests."""
    return outcome.status == 5 or (outcome.status == 4 and "ERROR: not found" in outcome.output)


def name_killer(outcome: Outcome) -> str:
    """Return the test that failed, or `import` where pytest did not come to run a test."""
    return outcome.failed[0] if outcome.failed else "import"


def kill_again(project: Project, mutant: Mutant, row: Row) -> bool:
    """Return whether the test of a record kills a mutant.

    Where the test does not exist any more, or the function has another change now, a test of the
    room may do it.
    """
    if row.test != "import":
        outcome = run_with(project, mutant.number, [row.test], {})
        is_same = row.body == mutant.body and row.mutation == mutant.text
        if not has_no_test(outcome) and (is_same or is_killed(outcome)):
            return is_killed(outcome)
    room = list_paths_of_room(project.root, mutant.file)
    options = ["-x", "-q", *room]
    return bool(room) and is_killed(project.run_tests(options, seconds=_OF_ROOM, on=mutant.number))


class Alone:
    """Runs killing tests without a mutant: where one fails, it says nothing of a mutant."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._file = folder / "alone.json"
        text = self._file.read_text() if self._file.exists() else "{}"
        self._passed: dict[str, bool] = json.loads(text)

    @property
    def failed(self) -> set[str]:
        """The tests that have failed so far."""
        return {test for test, passed in self._passed.items() if not passed}

    def find_failing(self, project: Project, reach: Reach, tests: Iterable[str]) -> set[str]:
        """Run those of the tests that have not run yet, and return which of all of them fail."""
        known = reach.seconds.keys() & set(tests)
        new = sorted(known - self._passed.keys())
        if new:
            outcome = run_with(project, None, new, reach.seconds, is_warm=True)
            for test in new:
                self._passed[test] = outcome.outcomes.get(test) == "passed"
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.write_text(json.dumps(self._passed, indent=0, sort_keys=True))
        return known & self.failed
