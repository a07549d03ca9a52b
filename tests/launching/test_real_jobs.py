"""`jaxdist launch` with processes that run a strategy: who ends how, and what is printed last."""

import pathlib

import pytest

from tests.launching.launcher import check_nobody_is_left, run_launcher

SCRIPT = str(pathlib.Path(__file__).with_name("steps_script.py"))


def test_two_processes_with_two_devices_each_add_up_and_end_well() -> None:
    outcome = run_launcher("-n", "2", "--devices-per-process", "2", SCRIPT, "3", "9", "stays")
    assert outcome.exit_code == 0, outcome.describe()
    for index in range(2):
        assert f"[{index}] total 8.0 of 4" in outcome.stdout
    assert "jaxdist launch" not in outcome.stderr
    check_nobody_is_left(outcome, 2)


@pytest.mark.parametrize(
    ("leaver", "how", "code", "part"),
    [
        (0, "killed", 137, "process 0 was ended by signal SIGKILL"),
        (1, "raises", 1, "process 1 failed first, with exit code 1"),
        (1, "leaves", 1, "process 1 ended with exit code 0 in the middle of the job"),
    ],
)
def test_the_process_that_leaves_is_the_cause_and_none_is_left(
    leaver: int, how: str, code: int, part: str
) -> None:
    outcome = run_launcher("-n", "2", SCRIPT, "100000000", str(leaver), how, timeout=80)
    assert outcome.exit_code == code, outcome.describe()
    last = outcome.stderr[outcome.stderr.rindex("jaxdist launch: ") :]
    assert part in last, outcome.describe()
    assert ("ValueError: planted" in last) == (how == "raises")
    assert "SIGABRT" not in outcome.stderr
    check_nobody_is_left(outcome, 2)
