"""Chooses the tests that run with a mutant."""

import pathlib
from collections import defaultdict
from collections.abc import Iterable, Sequence

from tools.mutants.reach import Reach
from tools.mutants.sample import Mutant

# What one mutant may cost: its tests, and the seconds that they take without a mutant.
MOST_TESTS = 30
MOST_SECONDS = 40.0


def choose_tests(
    mutants: Sequence[Mutant], reach: Reach, number: int, first: str, without: set[str]
) -> list[str]:
    """Choose the tests for a mutant.

    Tests that reach the change come first, from as many files as possible: the cheapest ones alone
    would often be rows of one table. Others of the same files follow, since a test that finds a
    result in a cache did not reach it.
    """
    direct = _list_reaching(mutants, reach, number)
    files = {get_file(test) for test in direct}
    beside = [test for test in reach.seconds if get_file(test) in files and test not in direct]
    beside.sort(key=lambda test: (reach.seconds[test], test))
    order = [first] if direct and first in reach.seconds else []
    order += [*take_turns(direct), *take_turns(beside)]
    chosen: list[str] = []
    left = MOST_SECONDS
    for test in dict.fromkeys(order):
        cost = reach.seconds[test]
        if test not in without and len(chosen) < MOST_TESTS and (cost <= left or not chosen):
            chosen.append(test)
            left -= cost
    return chosen


def _list_reaching(mutants: Sequence[Mutant], reach: Reach, number: int) -> list[str]:
    """List the tests that reach a change, cheapest first.

    A change that runs while modules are imported belongs to the tests that reach other changes of
    its file, or else to those of its room.
    """
    direct = reach.tests.get(number, [])
    if direct or number not in reach.imported:
        return direct
    file = mutants[number].file
    near = [other.number for other in mutants if other.file == file]
    found = {test for other in near for test in reach.tests.get(other, [])}
    room = _get_room(file)
    starts = (f"tests/{room}/", f"tests/test_{room}")
    found = found or {test for test in reach.seconds if test.startswith(starts)}
    return sorted(found, key=lambda test: (reach.seconds[test], test))


def list_paths_of_room(root: pathlib.Path, file: str) -> list[str]:
    """List the folders and files of tests of the room of a file of the package."""
    room = _get_room(file)
    found = [root / "tests" / room, *root.glob(f"tests/test_{room}*.py")]
    return [path.relative_to(root).as_posix() for path in found if path.exists()]


def _get_room(file: str) -> str:
    return file.partition("/")[0].removesuffix(".py").removeprefix("_")


def get_file(test: str) -> str:
    """Return the file of a test."""
    return test.partition("::")[0]


def take_turns(tests: Iterable[str]) -> list[str]:
    """Order tests so that each file gives its first one, then each its second one."""
    by_file: dict[str, list[str]] = defaultdict(list)
    for test in tests:
        by_file[get_file(test)].append(test)
    turns = [
        (turn, place, test)
        for place, own in enumerate(by_file.values())
        for turn, test in enumerate(own)
    ]
    return [test for _, _, test in sorted(turns)]
