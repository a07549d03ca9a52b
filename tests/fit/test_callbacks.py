"""Callbacks: when they are called, what they change, and what happens when one raises."""

import csv
import glob
import json
import os
import pathlib
import subprocess
import sys
import time
import types
from typing import Any, cast

import jax
import numpy as np
import optax
import pytest

from jaxdist import fit, tpu
from jaxdist.errors import (
    ArgumentError,
    ArgumentTypeError,
    BackendStartedError,
    CheckpointError,
)
from jaxdist.training import Checkpoints
from tests.fit.models import Data, make_data, make_model, mirrored

DATA = make_data(20)


def _fit(model: fit.Model, data: Data = DATA, **kwargs: Any) -> fit.History:
    given: dict[str, Any] = {"batch_size": 8, "epochs": 3, "verbose": 0, **kwargs}
    return model.fit(data.x, data.y, **given)


class _Recorder(fit.Callback):
    def __init__(self) -> None:
        self.calls: list[str] = []
        self.logs: list[Any] = []

    def _note(self, name: str, number: int | None, logs: Any) -> None:
        self.calls.append(name if number is None else f"{name} {number}")
        self.logs.append(dict(logs))

    def on_train_begin(self, logs: Any) -> None:
        self._note("train", None, logs)

    def on_train_end(self, logs: Any) -> None:
        self._note("train end", None, logs)

    def on_epoch_begin(self, epoch: int, logs: Any) -> None:
        self._note("epoch", epoch, logs)

    def on_epoch_end(self, epoch: int, logs: Any) -> None:
        self._note("epoch end", epoch, logs)

    def on_train_batch_begin(self, batch: int, logs: Any) -> None:
        self._note("batch", batch, logs)

    def on_train_batch_end(self, batch: int, logs: Any) -> None:
        self._note("batch end", batch, logs)

    def on_test_begin(self, logs: Any) -> None:
        self._note("test", None, logs)

    def on_test_end(self, logs: Any) -> None:
        self._note("test end", None, logs)

    def on_test_batch_begin(self, batch: int, logs: Any) -> None:
        self._note("test batch", batch, logs)

    def on_test_batch_end(self, batch: int, logs: Any) -> None:
        self._note("test batch end", batch, logs)

    def on_predict_begin(self, logs: Any) -> None:
        self._note("predict", None, logs)

    def on_predict_end(self, logs: Any) -> None:
        self._note("predict end", None, logs)

    def on_predict_batch_begin(self, batch: int, logs: Any) -> None:
        self._note("predict batch", batch, logs)

    def on_predict_batch_end(self, batch: int, logs: Any) -> None:
        self._note("predict batch end", batch, logs)


def test_callbacks_are_called_in_the_order_of_keras() -> None:
    recorder = _Recorder()
    model = make_model(mirrored(2), metrics=["accuracy"])
    history = _fit(model, epochs=1, callbacks=[recorder], validation_data=(DATA.x[:8], DATA.y[:8]))
    batches = [f"{word} {i}" for i in range(3) for word in ("batch", "batch end")]
    held_out = ["test", "test batch 0", "test batch end 0", "test end"]
    ends = ["epoch end 0", "train end"]
    assert recorder.calls == ["train", "epoch 0", *batches, *held_out, *ends]
    assert recorder.model is model
    assert recorder.params == {"epochs": 1, "steps": 3, "verbose": 0}
    last = {name: values[-1] for name, values in history.history.items()}
    assert recorder.logs[-1] == recorder.logs[-2] == last
    # The logs of a batch are those of the epoch up to it.
    assert recorder.logs[recorder.calls.index("batch end 2")]["loss"] == last["loss"]
    recorder.calls.clear()
    model.predict(DATA.x, 16, callbacks=[recorder])
    each = [f"predict batch{word} {i}" for i in range(2) for word in ("", " end")]
    assert recorder.calls == ["predict", *each, "predict end"]


def test_with_several_steps_of_a_dispatch_callbacks_get_the_first_and_last_batch() -> None:
    recorder = _Recorder()
    model = make_model(mirrored(2), steps_per_execution=2)
    model.fit(DATA.x, DATA.y, 4, epochs=1, verbose=0, callbacks=[recorder])
    batches = [call for call in recorder.calls if call.startswith("batch")]
    assert batches == ["batch 0", "batch end 1", "batch 2", "batch end 3", "batch 4", "batch end 4"]


@pytest.mark.parametrize(
    "method", ["on_train_begin", "on_epoch_begin", "on_train_batch_end", "on_epoch_end"]
)
def test_a_callback_that_raises_is_named_and_fit_can_be_called_again(method: str) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no space")

    model = make_model(mirrored(2))
    with pytest.raises(RuntimeError, match="no space") as error:
        _fit(model, callbacks=[fit.LambdaCallback(**{method: fail})])
    assert f"LambdaCallback.{method}" in error.value.__notes__[0]
    assert len(_fit(model).history["loss"]) == 3


def test_training_ends_after_the_epoch_or_batch_in_which_a_callback_says_so() -> None:
    def stop(model: fit.Model) -> None:
        model.stop_training = True

    model = make_model(mirrored(2))
    at_epoch = fit.LambdaCallback(on_epoch_end=lambda epoch, _: epoch == 1 and stop(model))
    assert _fit(model, epochs=5, callbacks=[at_epoch]).epoch == [0, 1]
    seen: list[int] = []

    def at_batch(batch: int, _: Any) -> None:
        seen.append(batch)
        if len(seen) == 2:
            stop(model)

    assert _fit(model, callbacks=[fit.LambdaCallback(on_train_batch_end=at_batch)]).epoch == [0]
    assert seen == [0, 1]


def _feed_logs(callback: fit.Callback, model: fit.Model, values: list[float]) -> int:
    """Call a callback with a value for each epoch; return after how many epochs it stopped."""
    callback.set_model(model)
    model.stop_training = False
    callback.on_train_begin({})
    epoch = -1
    for epoch, value in enumerate(values):
        callback.on_epoch_begin(epoch, {})
        callback.on_epoch_end(epoch, {"val_loss": value})
        if model.stop_training:
            break
    callback.close()
    return epoch + 1


@pytest.mark.parametrize(
    ("kwargs", "values", "epochs"),
    [
        ({"patience": 2}, [3, 2, 2.5, 2.5, 1], 4),
        ({"patience": 0}, [3, 2, 2], 3),
        ({"patience": 2, "min_delta": 0.5}, [3, 2.8, 2.6, 1], 3),
        ({"patience": 1, "mode": "max"}, [1, 2, 1.5, 3], 3),
        ({"patience": 2, "baseline": 1.0}, [3, 2, 2.5, 0.5], 3),
        ({"patience": 1, "start_from_epoch": 3}, [1, 2, 3, 4, 5], 5),
        ({"patience": 2}, [3, float("nan"), float("nan"), 1], 3),
    ],
)
def test_early_stopping_stops_where_keras_does(
    kwargs: Any, values: list[float], epochs: int
) -> None:
    model = make_model(mirrored(1))
    assert _feed_logs(fit.EarlyStopping(**kwargs), model, values) == epochs


def test_early_stopping_gives_back_the_weights_of_the_best_epoch() -> None:
    model = make_model(mirrored(2), optimizer=optax.sgd(0.1))
    kept: list[Any] = []
    stopping = fit.EarlyStopping("loss", patience=1, mode="max", restore_best_weights=True)
    keep = fit.LambdaCallback(on_epoch_end=lambda *_: kept.append(model.get_weights()))
    _fit(model, epochs=5, callbacks=[keep, stopping])
    # The loss falls, so by "max" the first epoch is the best.
    assert stopping.best_epoch == 0
    assert stopping.stopped_epoch == 1
    for one, other in zip(model.get_weights(), kept[0], strict=True):
        np.testing.assert_array_equal(one, other)


class _AddsValue(fit.Callback):
    def on_epoch_end(self, epoch: int, logs: Any) -> None:
        logs["val_own_error"] = 1.0


WATCHING = {
    "stopping": lambda folder, name: fit.EarlyStopping(name, patience=9),
    "rate": lambda folder, name: fit.ReduceLROnPlateau(name),
    "saving": lambda folder, name: fit.ModelCheckpoint(folder, name, save_best_only=True),
}


@pytest.mark.parametrize("kind", WATCHING)
def test_a_value_of_validation_is_refused_before_training_where_nothing_is_validated(
    kind: str, tmp_path: pathlib.Path
) -> None:
    model = make_model(mirrored(1), optimizer="sgd")
    before = model.get_weights()
    with pytest.raises(ArgumentError, match=r"monitor='val_loss', and fit has neither"):
        _fit(model, callbacks=[WATCHING[kind](tmp_path, "val_loss")])
    for one, other in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, other)
    # A callback of the user may add the value.
    own = [_AddsValue(), WATCHING[kind](tmp_path, "val_own_error")]
    assert len(_fit(model, callbacks=own).history["loss"]) == 3
    with pytest.raises(ArgumentError, match=r"monitor='val_loss', and the epoch has loss"):
        _fit(model, callbacks=[_AddsValue(), WATCHING[kind](tmp_path / "other", "val_loss")])
    kept = fit.ModelCheckpoint(tmp_path / "all", "val_loss")
    assert len(_fit(model, callbacks=[kept]).history["loss"]) == 3


def test_a_value_that_is_not_there_is_named() -> None:
    model = make_model(mirrored(1))
    given: dict[str, Any] = {"validation_data": (DATA.x, DATA.y)}
    with pytest.raises(ArgumentError, match=r"monitor='val_los_loss', and the epoch has loss"):
        _fit(model, callbacks=[fit.EarlyStopping("val_los_loss")], **given)
    with pytest.raises(ArgumentError, match=r"mode='best'"):
        fit.EarlyStopping(mode="best")
    with pytest.raises(ArgumentError, match=r"factor=1.5"):
        fit.ReduceLROnPlateau(factor=1.5)


def test_the_learning_rate_follows_a_schedule_without_another_program() -> None:
    model = make_model(mirrored(2), optimizer="sgd")
    rates: list[float] = []
    schedule = fit.LearningRateScheduler(lambda epoch, rate: rate / 2 if epoch else 0.5)
    note = fit.LambdaCallback(on_epoch_begin=lambda *_: rates.append(model.learning_rate))
    with jax.log_compiles(False):
        _fit(model, callbacks=[schedule, note])
    assert rates == [0.5, 0.25, 0.125]
    # With the rate 0 nothing moves: the step reads the rate from the state.
    before = model.get_weights()
    _fit(model, callbacks=[fit.LearningRateScheduler(lambda _: 0.0)])
    for one, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    with pytest.raises(ArgumentError, match=r"learning_rate=-1"):
        model.learning_rate = -1
    plain = make_model(mirrored(1), optimizer=optax.sgd(0.1))
    with pytest.raises(ArgumentError, match=r"inject_hyperparams"):
        _ = plain.learning_rate


def test_the_learning_rate_falls_on_a_plateau() -> None:
    model = make_model(mirrored(1), optimizer="sgd")
    callback = fit.ReduceLROnPlateau(factor=0.1, patience=2, cooldown=1, min_lr=0.0005)
    rates: list[float] = []
    callback.set_model(model)
    callback.on_train_begin({})
    for epoch, value in enumerate([1.0, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5]):
        callback.on_epoch_end(epoch, {"val_loss": value})
        rates.append(model.learning_rate)
    np.testing.assert_allclose(
        rates, [0.01, 0.01, 0.01, 0.001, 0.001, 0.0005, 0.0005, 0.0005], rtol=1e-6
    )


def test_logs_are_written_to_files(tmp_path: pathlib.Path) -> None:
    model = make_model(mirrored(2), metrics=["accuracy"])
    table, lines = tmp_path / "a" / "log.csv", tmp_path / "b" / "log.jsonl"
    history = _fit(model, callbacks=[fit.CSVLogger(table), fit.JSONLogger(lines)]).history
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert [float(row["loss"]) for row in rows] == history["loss"]
    assert [row["epoch"] for row in rows] == ["0", "1", "2"]
    assert [json.loads(line)["loss"] for line in lines.read_text().splitlines()] == history["loss"]
    more = [fit.CSVLogger(table, append=True), fit.JSONLogger(lines, append=True)]
    _fit(model, epochs=5, initial_epoch=3, callbacks=more)
    assert (
        len(list(csv.DictReader(table.read_text().splitlines())))
        == len(lines.read_text().splitlines())
        == 5
    )
    with pytest.raises(ArgumentError, match="separator"):
        fit.CSVLogger(table, separator="")


def test_values_are_written_for_tensorboard(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("tensorboardX")
    _fit(make_model(mirrored(2)), callbacks=[fit.TensorBoard(tmp_path)], validation_split=0.2)
    for part in ("train", "validation"):
        files = list((tmp_path / part).glob("events.out.tfevents.*"))
        assert len(files) == 1
        assert b"epoch_loss" in files[0].read_bytes()


def test_a_second_training_in_the_same_second_keeps_the_files_of_the_first(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # tensorboardX names its files by the second.
    writer = pytest.importorskip("tensorboardX.event_file_writer")
    clock = types.SimpleNamespace(time=lambda: 1e9, sleep=time.sleep)
    monkeypatch.setattr(writer, "time", clock)
    for _ in range(3):
        _fit(make_model(mirrored(2)), epochs=1, callbacks=[fit.TensorBoard(tmp_path)])
    files = list((tmp_path / "train").glob("events.out.tfevents.*"))
    assert len(files) == 3
    assert all(b"epoch_loss" in file.read_bytes() for file in files)


_PROFILE = """
import sys
from jaxdist import fit, tpu
from tests.fit.models import make_data, make_model, mirrored
import jaxdist
jaxdist.testing.virtual_devices(2)
data, model = make_data(20), make_model(mirrored(2))
profiler = fit.Profiler(sys.argv[1], first=2, count=2)
model.fit(data.x, data.y, 4, verbose=0, callbacks=[profiler])
"""


def test_a_profile_of_some_steps_is_recorded(tmp_path: pathlib.Path) -> None:
    # In a process of its own: JAX's profiler does not work where a test has loaded libtpu.
    root = pathlib.Path(__file__).parents[2]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(root)}
    command = [sys.executable, "-c", _PROFILE, str(tmp_path)]
    subprocess.run(command, env=environment, cwd=root, check=True, timeout=200)
    assert list(tmp_path.rglob("*.xplane.pb"))


@pytest.mark.skipif(bool(glob.glob("/dev/accel*")), reason="the profiler works with a TPU")
def test_a_profile_is_refused_where_it_would_end_the_process(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("libtpu")
    tpu.system_of("described:v5e:2x2")  # loads libtpu
    model = make_model(mirrored(2))
    before = model.get_weights()
    with pytest.raises(BackendStartedError, match="JAX_PLATFORMS=cpu"):
        _fit(model, callbacks=[fit.Profiler(tmp_path)])
    for one, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_checkpoints_are_those_of_the_epochs_and_training_goes_on_from_them(
    tmp_path: pathlib.Path,
) -> None:
    whole = make_model(mirrored(3), optimizer="adam")
    wanted = _fit(whole, epochs=4).history["loss"]
    first = make_model(mirrored(3), optimizer="adam")
    _fit(first, epochs=2, callbacks=[fit.ModelCheckpoint(tmp_path)])
    # On another number of replicas, in a new model.
    second = make_model(mirrored(8), optimizer="adam")
    resume = fit.ModelCheckpoint(tmp_path, resume=True)
    assert resume.epochs_done() == 2
    found = _fit(second, epochs=4, callbacks=[resume])
    np.testing.assert_allclose(found.history["loss"], wanted[2:], rtol=1e-4)
    assert resume.epochs_done() == 4


def test_only_the_best_epochs_are_saved(tmp_path: pathlib.Path) -> None:
    model = make_model(mirrored(1))
    callback = fit.ModelCheckpoint(tmp_path, save_best_only=True, keep=10)
    _feed_logs(callback, model, [3, 2, 2.5, 1, 1.5])
    assert callback.epochs_done() == 4
    assert sorted(int(p.name) for p in tmp_path.iterdir() if p.name.isdigit()) == [1, 2, 4]


def test_a_function_that_is_no_method_is_named() -> None:
    with pytest.raises(ArgumentError, match=r"given on_epoch\."):
        fit.LambdaCallback(on_epoch=print)
    with pytest.raises(ArgumentTypeError, match=r"on_epoch_end"):
        fit.LambdaCallback(on_epoch_end=cast(Any, 3))
    with pytest.raises(ArgumentTypeError, match=r"schedule"):
        fit.LearningRateScheduler(cast(Any, 0.1))


def test_a_training_that_begins_below_the_newest_checkpoint_is_refused_before_it(
    tmp_path: pathlib.Path,
) -> None:
    _fit(make_model(mirrored(1)), epochs=3, callbacks=[fit.ModelCheckpoint(tmp_path)])
    second = make_model(mirrored(1))
    before = second.get_weights()
    for callback in fit.ModelCheckpoint(tmp_path), fit.ModelCheckpoint(tmp_path, keep=1):
        with pytest.raises(CheckpointError) as caught:
            _fit(second, epochs=5, initial_epoch=1, callbacks=[callback])
        text = str(caught.value)
        assert text.startswith("fit.ModelCheckpoint was given epoch=2, and ")
        assert "is of epoch 3." in text
        assert "To continue after epoch 3, pass resume=True, save from epoch 4 on" in text
        assert (
            "discard_after(1) of training.Checkpoints before: it deletes the checkpoints 2" in text
        )
    for one, other in zip(before, second.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.discard_after(1) == (2, 3)
    _fit(second, epochs=2, initial_epoch=1, callbacks=[fit.ModelCheckpoint(tmp_path)])
    assert fit.ModelCheckpoint(tmp_path).epochs_done() == 2
