"""Stages, positions and experts on two processes, killed, and resumed on other stages."""

import pathlib

import numpy as np
import pytest

from tests.jobs.processes import layouts
from tests.processes.job import results_of_job, run_job

_ALONE = ("strategy.kind=auto", "strategy.virtual_devices=1", "strategy.stages=1")


@pytest.mark.slow
def test_a_run_that_is_killed_resumes_on_other_stages_with_the_losses_of_an_undisturbed_one(
    tmp_path: pathlib.Path,
) -> None:
    layouts.train(str(tmp_path / "whole"), _ALONE)
    folder = str(tmp_path / "parts")
    # One replica with 4 of its 8 stages on each process; checkpoints are of steps 2, 4 and 6.
    across = ("strategy.stages=8",)
    killed, other = (run_job(layouts.train, 2, args=(folder, across, 3), devices=4))[::-1]
    assert killed.exit_code == -9, killed.describe()
    assert other.raised == "UnavailableError", other.describe()
    assert {p.name for p in pathlib.Path(folder, "checkpoints").iterdir()} >= {"2"}
    chunks = ("strategy.stages=2", "strategy.chunks=2", "strategy.partition=fsdp")
    results_of_job(layouts.train, 2, args=(folder, chunks), devices=4)
    found = layouts.read_losses(folder)
    assert found[-1] < found[0]
    np.testing.assert_allclose(found, layouts.read_losses(str(tmp_path / "whole")), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "entries"),
    [
        ("experts", ("strategy.experts=8",)),
        (
            "long_sequences",
            ("strategy.positions=8", "strategy.attention=ring", "data.sequence_length=16"),
        ),
    ],
    ids=["experts", "positions"],
)
def test_a_replica_on_two_processes_has_the_losses_of_one_device(
    tmp_path: pathlib.Path, config: str, entries: tuple[str, ...]
) -> None:
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    entries = (*entries, "model.layers=1", "training.steps=3")
    alone = ("strategy.kind=auto", "strategy.virtual_devices=1")
    whole = ("strategy.experts=1", "strategy.positions=1")
    layouts.train(one, (*entries, *alone, *whole), config=config)
    results_of_job(layouts.train, 2, args=(two, entries, 0, config), devices=4)
    np.testing.assert_allclose(layouts.read_losses(two), layouts.read_losses(one), atol=1e-5)
