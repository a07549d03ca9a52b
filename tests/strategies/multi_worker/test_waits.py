"""`timeout_seconds` limits each wait for other processes, also outside of steps."""

from typing import Any

import pytest

from tests.processes.job import results_of_job, start_job
from tests.strategies.multi_worker.waits import LIMIT, wait

CALLS = {"read": "The read of a variable", "next": "next(iterator)"}


def _run_first(place: str, fault: str) -> dict[str, Any]:
    """Return what process 0 says, while process 1 does not come."""
    env = {"JAXDIST_HEARTBEAT_SECONDS": "5"}
    with start_job(wait, 2, args=(place, fault), env=env) as job:
        job.wait_for_end(0, 40)
        job.kill(1)
        first, _ = job.wait(10)
    assert first.exit_code == 0, first.describe()
    result: dict[str, Any] = first.result
    return result


@pytest.mark.parametrize("fault", ["sleep", "stop"])
@pytest.mark.parametrize("place", ["read", "next"])
def test_a_process_that_does_not_come_is_named_within_the_limit(place: str, fault: str) -> None:
    result = _run_first(place, fault)
    assert (result["error"], result["processes"]) == ("DeadlineExceededError", (1,)), result
    assert CALLS[place] in result["message"]
    # A report of who is behind takes some seconds more.
    assert LIMIT <= result["seconds"] < LIMIT + 8


@pytest.mark.parametrize("place", ["read", "next"])
def test_a_process_that_has_ended_is_named(place: str) -> None:
    result = _run_first(place, "kill")
    assert (result["error"], result["processes"]) == ("UnavailableError", (1,)), result


@pytest.mark.parametrize("place", ["read", "next"])
def test_threads_that_read_ahead_of_slow_loops_do_not_use_up_the_limit(place: str) -> None:
    assert results_of_job(wait, 2, args=(place, "slow")) == [{"error": None}] * 2
