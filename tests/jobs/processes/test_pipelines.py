"""A pipeline whose stages are on two processes, killed, and resumed on other stages."""

import pathlib

import numpy as np
import pytest

from tests.jobs.processes import pipelines
from tests.processes.job import results_of_job, run_job

_ALONE = ("strategy.kind=auto", "strategy.virtual_devices=1", "strategy.stages=1")


@pytest.mark.slow
def test_a_run_that_is_killed_resumes_on_other_stages_with_the_losses_of_an_undisturbed_one(
    tmp_path: pathlib.Path,
) -> None:
    pipelines.train(str(tmp_path / "whole"), _ALONE)
    folder = str(tmp_path / "parts")
    # One replica with 4 of its 8 stages on each process; checkpoints are of steps 2, 4 and 6.
    across = ("strategy.stages=8",)
    killed, other = (run_job(pipelines.train, 2, args=(folder, across, 3), devices=4))[::-1]
    assert killed.exit_code == -9, killed.describe()
    assert other.raised == "UnavailableError", other.describe()
    assert {p.name for p in pathlib.Path(folder, "checkpoints").iterdir()} >= {"2"}
    chunks = ("strategy.stages=2", "strategy.chunks=2", "strategy.partition=fsdp")
    results_of_job(pipelines.train, 2, args=(folder, chunks), devices=4)
    found = pipelines.read_losses(folder)
    assert found[-1] < found[0]
    np.testing.assert_allclose(found, pipelines.read_losses(str(tmp_path / "whole")), atol=1e-5)
