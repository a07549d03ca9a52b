"""Calls that differ between the processes of a job, and loops that one process leaves."""

import functools

import pytest

from tests.processes.job import results_of_job, run_job
from tests.strategies.multi_worker.differing import differ, loop_until_one_leaves


@functools.cache
def _differing() -> list[dict[str, str]]:
    return results_of_job(differ, 2, timeout=120)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("values", ["ProgramMismatchError", "args[0] is another value in process 1"]),
        ("shapes", ["ProgramMismatchError", "process 1", "float32[2]", "float32[1]"]),
        ("dtypes", ["ProgramMismatchError", "in process 1: float32 of rank 1, and int32"]),
        ("calls", ["ProgramMismatchError", "process 1", "ReduceOp.MEAN", "ReduceOp.SUM elsewhere"]),
        ("compiler options", ["ProgramMismatchError", "vector_width=256", "vector_width=128"]),
        ("saved program", ["ProgramMismatchError", "saved program", "missing.program", "none"]),
        ("too long", ["ArgumentError", "timeout_seconds=1e+06", "JAXDIST_COLLECTIVE_SECONDS"]),
        ("values later", ["ProgramMismatchError", "args[0] of step of call", "process 1"]),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_call_that_differs_between_processes_is_an_error_in_each(
    name: str, parts: list[str]
) -> None:
    for result in _differing():
        for part in parts:
            assert part in result[name]


def test_lists_are_reduced_and_gathered_as_in_one_process() -> None:
    for result in _differing():
        assert result["lists"] == "no error, but ([2.0, 1.0], [0, 1, 1])"


@pytest.mark.parametrize("where", ["reduce", "batch"])
def test_a_loop_that_one_process_leaves_is_an_error_in_the_other(where: str) -> None:
    here, other = run_job(loop_until_one_leaves, 2, args=(where,), timeout=120)
    assert other.exit_code == 0, other.describe()
    assert here.result == {"error": "UnavailableError", "processes": (1,)}, here.describe()
