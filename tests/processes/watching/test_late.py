"""Real processes of which one does not come: the others name it, live on, and end well."""

import re
import time
from typing import Any

import pytest

from tests.processes.job import Outcome, start_job
from tests.processes.watching.steps import (
    LARGE,
    SMALL,
    STEP,
    be_late,
    collect_reports,
    reduce_with_late,
)

SECONDS = 2.0
# A process without news for 3 s is silent; the rest is for a machine that does other work.
MARGIN = 5.0


def _run_others(how: str, late: int, count: int, *args: Any) -> list[Outcome]:
    """Run a job of which one process does not end by itself, and return what the others did."""
    with start_job(reduce_with_late, count, args=(how, late, *args)) as job:
        others = [i for i in range(count) if i != late]
        end = time.monotonic() + 60
        while any(job.exit_code(i) is None for i in others) and time.monotonic() < end:
            time.sleep(0.05)
        return [outcome for outcome in job.wait(0.0) if outcome.index in others]


def _assert_names(outcome: Outcome, late: int, kind: str) -> str:
    assert outcome.exit_code == 0, outcome.describe()
    found = outcome.result
    assert (found["kind"], found["processes"]) == (kind, (late,)), found
    first = found["text"].splitlines()[0]
    assert re.findall(r"(?i)process (\d+)", first) == [str(late)]
    assert found["local"] == 6.0
    return found["text"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "size", "count"),
    [
        ("loops", SMALL, 3),
        ("loops", LARGE, 2),
        ("is stopped", LARGE, 3),
        ("is stopped", SMALL, 2),
        ("holds the GIL", LARGE, 2),
        ("has caught an exception", SMALL, 2),
    ],
)
def test_a_wait_with_a_limit_names_the_process_that_does_not_come(
    how: str, size: int, count: int
) -> None:
    for outcome in _run_others(how, 1, count, size, SECONDS):
        text = _assert_names(outcome, 1, "DeadlineExceededError")
        assert outcome.result["seconds"] < SECONDS + MARGIN
        if how != "is stopped":
            assert "steps.py" in text.splitlines()[0]
            assert "be_late" in text
        if how in ("loops", "has caught an exception"):
            assert f"step {STEP}" in text.splitlines()[0]
            assert "reduce_with_late" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "size", "late"),
    [("is killed", LARGE, 1), ("exits", SMALL, 1), ("raises", LARGE, 0), ("is killed", SMALL, 0)],
)
def test_a_process_that_ends_is_named_without_a_limit(how: str, size: int, late: int) -> None:
    for outcome in _run_others(how, late, 3, size, None):
        text = _assert_names(outcome, late, "UnavailableError")
        assert outcome.result["seconds"] < MARGIN
        if how == "raises":
            assert re.search(r"ValueError: no rows, at steps.py:\d+ \(be_late\)", text)
        if how == "exits":
            assert "its program has ended" in text


@pytest.mark.slow
@pytest.mark.parametrize("is_plain", [False, True])
def test_every_process_logs_one_report_of_a_hang(is_plain: bool) -> None:
    quiet = {"JAXDIST_QUIET_SECONDS": "2"}
    with start_job(collect_reports, 3, args=(1, is_plain), env=quiet) as job:
        outcomes = job.wait(60.0)
    for outcome in outcomes:
        assert outcome.exit_code == 0, outcome.describe()
        assert len(outcome.result) == 1, outcome.describe()
        first = outcome.result[0].splitlines()[0]
        assert first.startswith("process 1 is behind")
        assert re.findall(r"(?i)process (\d+)", first) == ["1"]
        assert "collect_reports" in first
        waits = "float(array)" if is_plain else "reduce (call 2)"
        assert waits in outcome.result[0]


@pytest.mark.slow
def test_after_abort_seconds_every_process_ends_with_a_code_of_its_own() -> None:
    times = {"JAXDIST_QUIET_SECONDS": "1", "JAXDIST_ABORT_SECONDS": "3"}
    with start_job(reduce_with_late, 2, args=("loops", 1, SMALL, None), env=times) as job:
        outcomes = job.wait(60.0)
    for outcome in outcomes:
        assert outcome.exit_code == 75, outcome.describe()
        assert "process 1 is behind" in outcome.stderr


def test_the_late_process_does_what_its_name_says() -> None:
    with pytest.raises(ValueError, match="no rows"):
        be_late("raises")
    with pytest.raises(SystemExit):
        be_late("exits")
