"""Records which tests reach which mutant, by one run of the short tests without a mutant."""

import collections
import dataclasses
import json
import pathlib

from tools.mutants.project import Outcome, Project

_MOST_SECONDS = 3 * 3600.0


@dataclasses.dataclass(frozen=True)
class Reach:
    """What the tests do without a mutant."""

    # Seconds of each test that passes.
    seconds: dict[str, float]
    # By the number of a mutant: the tests that pass and execute the statement that it changes.
    tests: dict[int, list[str]]
    # Mutants whose statement is executed while modules are imported or tests are collected.
    imported: set[int]
    failed: list[str]


def find_reach(project: Project, processes: int) -> Reach:
    """Return which tests reach which mutant; run the tests unless it was done for this code."""
    file = project.folder / "reach.json"
    if not file.exists():
        project.prepare()
        options = ["-q", "-n", str(processes)] if processes else ["-q"]
        outcome = project.run_tests(options, seconds=_MOST_SECONDS, record=True)
        (project.folder / "reach.log").write_text(outcome.output)
        if outcome.status not in (0, 1):
            raise SystemExit(f"{outcome.output[-3000:]}\n\nThe tests ended with {outcome.status}.")
        _save(make_reach(outcome), file)
    return _load(file)


def make_reach(outcome: Outcome) -> Reach:
    """Read what a run has recorded; tests that fail without a mutant tell nothing of one."""
    passed = {test for test, result in outcome.outcomes.items() if result == "passed"}
    found: dict[int, set[str]] = collections.defaultdict(set)
    imported: set[int] = set()
    for line in outcome.reached.splitlines():
        number, _, test = line.partition("\t")
        if test in passed:
            found[int(number)].add(test)
        elif not test:
            imported.add(int(number))
    seconds = {test: outcome.seconds[test] for test in sorted(passed)}
    tests = {n: sorted(own, key=lambda t: (seconds[t], t)) for n, own in sorted(found.items())}
    return Reach(seconds, tests, imported, outcome.failed)


def _save(reach: Reach, file: pathlib.Path) -> None:
    part = file.with_suffix(".part")
    values = {**dataclasses.asdict(reach), "imported": sorted(reach.imported)}
    part.write_text(json.dumps(values, indent=0))
    part.rename(file)


def _load(file: pathlib.Path) -> Reach:
    values = json.loads(file.read_text())
    tests = {int(number): own for number, own in values["tests"].items()}
    return Reach(values["seconds"], tests, set(values["imported"]), values["failed"])
