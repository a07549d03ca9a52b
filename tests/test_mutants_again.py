"""The tests that killed mutants when the record was made kill them now."""

import functools

import pytest

from tests.tables import sampled
from tools.mutants import __main__ as command_line
from tools.mutants import record, sandbox
from tools.mutants.killing import kill_again
from tools.mutants.project import RECORD, Project
from tools.mutants.record import Row
from tools.mutants.sample import hash_of

# Those of the lowest hashes, so that a record of other code has the same functions.
COUNT = 40


def _choose() -> list[Row]:
    rows = record.load(command_line.ROOT / RECORD)
    first = sorted(rows, key=lambda row: (hash_of(row.function), row.body, row.file))[:COUNT]
    return [row for row in first if row.result == "killed"]


@functools.cache
def _get_project() -> Project:
    return Project(command_line.ROOT)


@pytest.mark.long
@pytest.mark.skipif(not sandbox.is_available(), reason="this machine does not allow namespaces")
@pytest.mark.parametrize(
    "row", sampled(_choose(), 1, name=lambda row: f"{row.file}:{row.function}:{row.body}")
)
def test_a_mutant_is_killed_by_the_test_that_killed_it_before(row: Row) -> None:
    project = _get_project()
    rows = record.load(project.root / RECORD)
    number = next((n for n, one in record.pair(project.mutants, rows).items() if one == row), None)
    if number is None:
        pytest.skip(f"{row.function} does not exist any more: run `make mutants`")
    assert kill_again(project, project.mutants[number], row)
