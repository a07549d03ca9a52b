"""The harness itself: jobs of processes that tests start."""

import os
import signal
import sys
import time

import pytest

from tests.processes.job import Job, results_of_job, run_job, start_job

ADD = "tests.processes.adding:add_over_processes"


def read_environment() -> tuple[str | None, str | None, int]:
    """What a process finds."""
    return os.environ.get("MINE"), os.environ.get("JAXDIST_SERVICE"), os.getpid()


def fail_in(index: int, code: int | None) -> int:
    """Raise, or exit with a code, in one process."""
    print("started", flush=True)
    mine = '"index": ' + str(index) in os.environ["TF_CONFIG"]
    if mine and code is not None:
        sys.exit(code)
    if mine:
        raise KeyError("planted")
    return index


def wait_for_ever() -> None:
    """Never return."""
    print("waiting", flush=True)
    while True:
        time.sleep(0.01)


@pytest.mark.parametrize("service", [True, False])
def test_processes_of_a_job_add_over_all_their_devices(service: bool) -> None:
    results = results_of_job(ADD, 2, devices=2, service=service)
    assert results == [{"total": 0 + 1 + 10 + 11.0, "local": 2, "all": 4}] * 2


def test_each_process_gets_its_own_environment() -> None:
    results = results_of_job(
        read_environment, 2, env=lambda i: {"MINE": f"mine {i}", "JAXDIST_SERVICE": None}
    )
    assert [result[:2] for result in results] == [("mine 0", None), ("mine 1", None)]
    assert len({result[2] for result in results} | {os.getpid()}) == 3


def test_an_exception_and_an_exit_code_are_outcomes() -> None:
    zero, one = run_job(fail_in, 2, args=(1, None))
    assert (zero.exit_code, zero.result, zero.raised, zero.error) == (0, 1, None, None)
    assert (one.exit_code, one.result, one.raised) == (1, None, "KeyError")
    assert one.error is not None
    assert "planted" in one.error
    assert one.stdout == "started\n"
    assert "KeyError: 'planted'" in one.stderr
    assert [outcome.exit_code for outcome in run_job(fail_in, 2, args=(0, 3))] == [3, 0]


def test_source_is_run_as_a_script() -> None:
    assert results_of_job("import os\nresult = os.environ['TF_CONFIG'][:4]", 1) == ['{"cl']


def _is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_a_process_that_takes_too_long_is_named_killed_and_shows_its_stack() -> None:
    with start_job(wait_for_ever, 2) as job:
        job.wait_for_line(0, "waiting")
        job.wait_for_line(1, "waiting")
        job.kill(1, signal.SIGKILL)
        zero, one = job.wait(0.5)
    assert (zero.timed_out, one.timed_out) == (True, False)
    assert (zero.exit_code, one.exit_code) == (-signal.SIGKILL, -signal.SIGKILL)
    assert "wait_for_ever" in zero.stderr
    assert all(map(_is_gone, job.pids))


def test_no_process_is_left_when_a_test_fails() -> None:
    jobs: list[Job] = []

    def fail() -> None:
        with start_job(wait_for_ever, 2) as job:
            jobs.append(job)
            job.wait_for_line(1, "waiting")
            job.kill(1, signal.SIGSTOP)
            raise KeyError("planted")

    with pytest.raises(KeyError, match="planted"):
        fail()
    assert all(map(_is_gone, jobs[0].pids))


def test_a_line_that_never_comes_is_an_error_that_shows_the_output() -> None:
    with (
        start_job(fail_in, 1, args=(0, None)) as job,
        pytest.raises(AssertionError, match=r"(?s)ended without a line with 'x'.*planted"),
    ):
        job.wait_for_line(0, "x")
