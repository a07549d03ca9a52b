"""Training on several processes that share nothing but a bucket."""

import pathlib
import uuid

import numpy as np
import pytest

from tests.checkpoints.buckets import training
from tests.checkpoints.buckets.stores import BUCKET, SCHEMES, use_store
from tests.processes.job import results_of_job, run_job


@pytest.fixture(params=SCHEMES)
def url(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    use_store(request.param, monkeypatch)
    return f"{request.param}://{BUCKET}/{uuid.uuid4().hex}"


@pytest.mark.parametrize("processes", [1, 4])
def test_a_job_that_was_killed_continues_on_another_number_of_processes(
    url: str, tmp_path: pathlib.Path, processes: int
) -> None:
    undisturbed = results_of_job(training.train, 2, args=(str(tmp_path), None), devices=2)[0]
    outcomes = run_job(training.train, 2, args=(url, 8), devices=2)
    assert outcomes[1].exit_code == -9, outcomes[1].describe()
    assert not any(outcome.timed_out for outcome in outcomes)
    results = results_of_job(training.train, processes, args=(url, None), devices=4 // processes)
    for result in results:
        assert result["first"] in (3, 6)
        assert result["whole"] == {float(sum(range(training.STEPS)))}
        for number, loss in result["losses"].items():
            np.testing.assert_allclose(loss, undisturbed["losses"][number], rtol=1e-6)
        assert len(result["losses"]) == training.STEPS - result["first"]
