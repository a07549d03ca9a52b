"""`fit` in two processes of two devices has the numbers of one device, in both of them."""

import pathlib
from typing import Any

import numpy as np
import pytest

from tests.fit import float16_in_processes, in_processes
from tests.fit.models import make_data, make_model, mirrored
from tests.processes.job import run_job

COUNTS = [
    (1, 1, True), (1, 100, False), (7, 1, False), (7, 32, True), (100, 32, False),
    (100, 100, True), (1797, 32, False), (1797, 100, True),
]  # fmt: skip


def _train_alone(count: int, size: int, is_weighted: bool) -> list[Any]:
    data = make_data(count)
    weight = data.weight if is_weighted else None
    model = make_model(mirrored(1), metrics=["accuracy"])
    given: dict[str, Any] = {"batch_size": size, "verbose": 0, "sample_weight": weight}
    history = model.fit(data.x, data.y, epochs=2, **given).history
    logs = model.evaluate(data.x, data.y, return_dict=True, **given)
    return [history, logs, model.predict(data.x, size), model.get_weights()]


@pytest.mark.slow
def test_two_processes_train_as_one_device() -> None:
    outcomes = run_job(in_processes.train, 2, args=(COUNTS,), devices=2)
    for outcome in outcomes:
        assert outcome.exit_code == 0, outcome.describe()
    for index, given in enumerate(COUNTS):
        wanted = _train_alone(*given)
        for outcome in outcomes:
            history, logs, outputs, weights = outcome.result[index]
            for name in ("loss", "accuracy"):
                np.testing.assert_allclose(history[name], wanted[0][name], rtol=1e-5)
                np.testing.assert_allclose(logs[name], wanted[1][name], rtol=1e-5)
            np.testing.assert_allclose(outputs, wanted[2], rtol=1e-4, atol=1e-6)
            for one, other in zip(weights, wanted[3], strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_processes_save_together_and_one_of_them_writes_logs(tmp_path: pathlib.Path) -> None:
    outcomes = run_job(in_processes.train_and_write, 2, args=(str(tmp_path),), devices=2)
    for outcome in outcomes:
        assert outcome.exit_code == 0, outcome.describe()
    data, whole = make_data(20), make_model(mirrored(1))
    wanted = whole.fit(data.x, data.y, 8, epochs=3, verbose=0).history["loss"]
    for outcome in outcomes:
        np.testing.assert_allclose(outcome.result, wanted, rtol=1e-5)
    lines = (tmp_path / "log.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["epoch", "0", "1", "2"]
    assert [o.stdout.count("loss ") for o in outcomes] == [3, 0]
    assert [o.stdout.count("resumes after epoch 2 (") for o in outcomes] == [1, 0]
    other = make_model(mirrored(3))
    other.load(tmp_path / "whole")
    for one, two in zip(other.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("every_process", [True, False])
def test_processes_resume_a_training_within_an_epoch(
    every_process: bool, tmp_path: pathlib.Path
) -> None:
    arguments = (str(tmp_path), [2, 3, 2], every_process)
    outcomes = run_job(in_processes.train_with_interrupts, 2, args=arguments, devices=2)
    for outcome in outcomes:
        assert outcome.exit_code == 0, outcome.describe()
        whole, interrupted = outcome.result
        assert whole == interrupted
        assert len(whole[0]["loss"]) == 3


@pytest.mark.slow
def test_processes_skip_the_same_steps_of_float16_and_have_the_average_of_one() -> None:
    outcomes = run_job(float16_in_processes.train, 2, devices=2)
    scales, history, *weights = float16_in_processes.train(mirrored(4))
    assert scales == [4096, 2048, 2048, 2048, 1024, 1024]
    for outcome in outcomes:
        assert outcome.exit_code == 0, outcome.describe()
        assert outcome.result == outcomes[0].result
        assert outcome.result[0] == scales
        for name in ("loss", "val_loss"):
            np.testing.assert_allclose(outcome.result[1][name], history[name], rtol=1e-2)
        for found, wanted in zip(outcome.result[2:], weights, strict=True):
            for one, other in zip(found, wanted, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-2, atol=1e-3)


@pytest.mark.slow
def test_processes_that_call_fit_differently_raise_before_they_wait(tmp_path: pathlib.Path) -> None:
    outcomes = run_job(in_processes.call_differently, 2, args=(str(tmp_path / "saved"),), devices=1)
    wanted = [
        "epochs is 2 there, and 1 elsewhere",
        "the first epoch is 2 there, and 1 elsewhere",
        "steps_per_epoch is 2 there, and None elsewhere",
        "whether it validates is True there, and False elsewhere",
        "save_freq of each ModelCheckpoint is ['epoch'] there, and [] elsewhere",
    ]
    for outcome in outcomes:
        assert outcome.exit_code == 0, outcome.describe()
        *errors, epochs = outcome.result
        assert epochs == "[0]"
        for error, what in zip(errors, wanted, strict=True):
            assert f"process 1 makes another call: {what}" in error
