"""`Estimator` with `MultiWorkerMirroredStrategy`: processes in step, that write one folder."""

import json
import pathlib
from typing import Any

import numpy as np
import pytest

import jaxdist
from jaxdist import estimator as est
from jaxdist.errors import UnsupportedError
from tests.estimator.models import Record, X, Y, descend, model_fn, read_weights
from tests.processes.job import results_of_job

pytestmark = pytest.mark.slow

_PROCESSES, _REPLICAS, _SIZE = 2, 2, 5


def _read_own(input_context: Any) -> Any:
    """Return batches of 5 rows, those of this process."""
    rows = len(X) // _PROCESSES
    start = rows * input_context.input_pipeline_id
    return [(X[n : n + _SIZE], Y[n : n + _SIZE]) for n in range(start, start + rows, _SIZE)]


class _StopOne(est.SessionRunHook):
    """Wishes the end in one process only."""

    def __init__(self, index: int) -> None:
        self._index = index

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Wish the end after 3 steps of process 1."""
        if self._index == 1 and run_values.results["global_step"] >= 3:
            run_context.request_stop()


def _train(folder: str) -> dict[str, Any]:
    strategy = jaxdist.MultiWorkerMirroredStrategy()
    index = strategy.cluster_resolver.task_id
    config = est.RunConfig(folder, train_distribute=strategy, save_checkpoints_secs=1e-9)
    found: dict[str, Any] = {"is_chief": config.is_chief}
    estimator = est.Estimator(model_fn, config=config)
    specs = est.TrainSpec(_read_own), est.EvalSpec(_read_own)
    found["result"] = est.train_and_evaluate(estimator, *specs)
    found["weights"] = read_weights(estimator)
    found["first"] = estimator.latest_checkpoint()
    # It goes on from there; one process wishes the end, and all end with the tenth step.
    record = Record()
    many = lambda input_context: _read_own(input_context) * 20  # noqa: E731
    estimator.train(many, hooks=[_StopOne(int(index or 0)), record])
    found["last"] = estimator.latest_checkpoint()
    found["steps"] = len(record.losses)
    found["losses"] = record.losses
    refused = est.Estimator(model_fn, config=config.replace(eval_distribute=strategy))
    try:
        refused.evaluate(_read_own)
    except UnsupportedError as error:
        found["error"] = str(error)
    return found


def test_processes_in_step_train_one_model_and_write_one_folder(tmp_path: pathlib.Path) -> None:
    found = results_of_job(
        _train, _PROCESSES, args=(str(tmp_path),), devices=_REPLICAS, timeout=150
    )
    groups = []
    half = len(X) // _PROCESSES
    for n in range(0, half, _REPLICAS * _SIZE):
        rows = [*range(n, n + _REPLICAS * _SIZE), *range(half + n, half + n + _REPLICAS * _SIZE)]
        groups.append((X[rows], Y[rows]))
    expected = descend(groups)
    for one in found:
        np.testing.assert_allclose(one["weights"], expected, rtol=1e-5)
        assert one["result"] == (None, [])
        assert one["first"].endswith("/2")
        # All processes tell each other after ten steps, and then save by the clock, too.
        assert one["steps"] == 10
        assert one["last"].endswith("/12")
        assert "over 2 processes" in one["error"]
    assert found[0]["losses"] == found[1]["losses"]
    assert [one["is_chief"] for one in found] == [True, False]
    # The chief alone writes summaries.
    lines = (tmp_path / "summaries.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 12]
