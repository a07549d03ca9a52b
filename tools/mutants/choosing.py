"""Chooses the tests that run with a mutant."""

import itertools
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
    sources = _list_sources(mutants, reach, number)
    found = {test for source in sources for test in source}
    files = {get_file(test) for test in found}
    beside = [test for test in reach.seconds if get_file(test) in files and test not in found]
    beside.sort(key=lambda test: (reach.seconds[test], test))
    order = [first] if found and first in reach.seconds else []
    order += [*alternate(map(take_turns, sources)), *take_turns(beside)]
    chosen: list[str] = []
    left = MOST_SECONDS
    for test in dict.fromkeys(order):
        cost = reach.seconds[test]
        if test not in without and len(chosen) < MOST_TESTS and (cost <= left or not chosen):
            chosen.append(test)
            left -= cost
    return chosen


def _list_sources(mutants: Sequence[Mutant], reach: Reach, number: int) -> list[list[str]]:
    """List where tests for a mutant come from, each with its tests, cheapest first.

    What a change does that runs while modules are imported, other tests notice than those that
    reach it, such as tests that start a process which imports the package. So the tests that reach
    other changes of its file, and those of its room, are sources as well.
    """
    direct = reach.tests.get(number, [])
    if number not in reach.imported:
        return [direct]
    file = mutants[number].file
    near = [other.number for other in mutants if other.file == file and other.number != number]
    of_file = {test for other in near for test in reach.tests.get(other, [])}
    room = _get_room(file)
    starts = (f"tests/{room}/", f"tests/test_{room}")
    of_room = {test for test in reach.seconds if test.startswith(starts)}
    return [
        direct,
        *(sorted(some, key=lambda t: (reach.seconds[t], t)) for some in (of_file, of_room)),
    ]


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


def alternate(sources: Iterable[Sequence[str]]) -> list[str]:
    """Take the first test of each source, then the second one of each, and so on."""
    turns = itertools.zip_longest(*sources)
    return [test for turn in turns for test in turn if test is not None]
