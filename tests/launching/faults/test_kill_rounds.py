"""A job whose processes are killed at random moments loses no example and repeats none."""

import json
import os
import pathlib
import random
import re
import signal
import time

import jax
import pytest

import jaxdist
from tests.launching.faults.rounds_job import EPOCHS, train
from tests.launching.launcher import is_gone, start_launcher
from tests.processes.job import Job
from tests.tables import sampled

SCRIPT = str(pathlib.Path(__file__).with_name("rounds_job.py"))
SECONDS_FOR_A_START = 90.0


@pytest.mark.slow
@pytest.mark.timeout(1100)
@pytest.mark.parametrize("kills", sampled([2, 50], 1))
def test_the_digits_job_survives_kills_at_random_moments(
    kills: int, tmp_path: pathlib.Path
) -> None:
    expected = train(jaxdist.MirroredStrategy(jax.devices()[:2]), None)
    drawn = random.Random(kills)
    env: dict[str, str | None] = {"JAX_PLATFORMS": "cpu", "JAXDIST_HEARTBEAT_SECONDS": "5"}
    how = ("-n", "2", "--restarts", str(kills + 1), SCRIPT, str(tmp_path))
    with start_launcher(*how, env=env) as job:
        for number in range(1, kills + 1):
            pids = _wait_for_steps(job, number)
            # A random moment of the work, which takes some seconds in all.
            time.sleep(drawn.uniform(0, 0.3))
            if (tmp_path / "result.json").exists():
                break
            os.kill(drawn.choice(pids), signal.SIGKILL)
        (outcome,) = job.wait(SECONDS_FOR_A_START + 120)
    assert not outcome.timed_out, outcome.describe()
    assert outcome.exit_code == 0, outcome.describe()
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["counts"] == [EPOCHS, EPOCHS]
    assert result["done"] == expected["done"]
    assert result["accuracy"] == pytest.approx(expected["accuracy"], abs=0.002)
    assert result["loss"] == pytest.approx(expected["loss"], rel=1e-4)
    assert all(map(is_gone, _find_pids(outcome.stdout)))


def _wait_for_steps(job: Job, attempt: int) -> list[int]:
    """Wait until both processes of an attempt have made a step; return their pids."""
    deadline = time.monotonic() + SECONDS_FOR_A_START
    while time.monotonic() < deadline:
        text = "\n".join(job.lines(0))
        pids = _find_pids(text)
        if len(pids) >= 2 * attempt:
            # The last two; both have begun when each has printed a step after its pid.
            after = text[text.rindex(f"pid {pids[2 * attempt - 1]}") :]
            if len(set(re.findall(r"^\[(\d+)\] at ", after, re.MULTILINE))) == 2:
                return pids[2 * attempt - 2 : 2 * attempt]
        if job.exit_code(0) is not None:
            return pids[-2:]
        time.sleep(0.02)
    raise AssertionError(f"attempt {attempt} made no step in {SECONDS_FOR_A_START} s")


def _find_pids(text: str) -> list[int]:
    return [int(pid) for pid in re.findall(r"^\[\d+\] pid (\d+)$", text, re.MULTILINE)]
