"""A training that is interrupted anywhere and resumed ends as the one that was not."""

import csv
import dataclasses
import itertools
import json
import pathlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jaxdist
from jaxdist import fit
from jaxdist._checkpoints import put_into, to_plain
from jaxdist.errors import (
    ArgumentError,
    ArgumentTypeError,
    CheckpointError,
    DamagedCheckpointError,
)
from jaxdist.fit._callbacks.saving import Position
from jaxdist.fit._loop.progress import Progress
from jaxdist.fit._loop.resuming import Start
from jaxdist.training import Checkpoints
from tests.fit.models import make_data, make_model, mirrored
from tests.parameter_server.strategy.making import make_strategy
from tests.strategies_under_test import STRATEGIES
from tests.tables import sampled

DATA = make_data(20)
HELD_OUT = make_data(9, seed=5)
SIZE = 8
STEPS = 3  # of an epoch: 8, 8 and 4 rows
EPOCHS = 3


class _Net(nnx.Module):
    """A module with statistics and random numbers."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(DATA.x.shape[1], 6, rngs=rngs)
        self.norm = nnx.BatchNorm(6, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.last = nnx.Linear(6, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(self.dropout(jax.nn.relu(self.norm(self.first(x)))))


class _Killed(BaseException):
    """Stands for the end of the process."""


class _Kill(fit.Callback):
    """Raises after a number of steps."""

    def __init__(self, after: int) -> None:
        self._left = after

    def on_train_batch_end(self, batch: int, logs: Any) -> None:
        self._left -= 1
        if self._left == 0:
            raise _Killed


class _Seen(fit.Callback):
    """Keeps numbers and arrays from one step to the next."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.mean = np.zeros(2)
        self.count = (0, 0)

    def on_train_batch_end(self, batch: int, logs: Any) -> None:
        self.batches.append(batch)
        self.mean = 0.5 * self.mean + np.array([logs["loss"], batch])

    def on_epoch_end(self, epoch: int, logs: Any) -> None:
        self.count = (epoch + 1, self.count[1] + len(self.batches))

    def get_state(self) -> Any:
        return {"batches": self.batches, "mean": self.mean, "count": self.count, "last": b"\x00"}

    def set_state(self, state: Any) -> None:
        assert state["last"] == b"\x00"
        self.batches, self.mean = state["batches"], state["mean"]
        self.count = tuple(state["count"])


def _rows(order: Any) -> Iterator[Any]:
    for first in range(0, 20, SIZE):
        taken = order[first : first + SIZE]
        yield DATA.x[taken], DATA.y[taken]


class _Loader:
    """A dataset that starts again at each `iter`, and does not say where it is."""

    def __iter__(self) -> Iterator[Any]:
        return _rows(np.arange(20)[::-1])


def _endless() -> Iterator[Any]:
    for number in itertools.count():
        yield from _rows(np.random.default_rng(number).permutation(20))


def _in_batches(shuffle: bool) -> Any:
    return jaxdist.data.batches((DATA.x, DATA.y), SIZE, shuffle=shuffle, seed=3)


# What `fit` gets, made anew in each process.
SOURCES: dict[str, Callable[[], dict[str, Any]]] = {
    "arrays": lambda: {"x": DATA.x, "y": DATA.y, "batch_size": SIZE},
    "list": lambda: {"x": list(_rows(np.arange(20)))},
    "batches": lambda: {"x": _in_batches(shuffle=True)},
    "distributed": lambda: {
        "x": mirrored(2).experimental_distribute_dataset(_in_batches(shuffle=True))
    },
    "loader": lambda: {"x": _Loader()},
    "arrays in steps": lambda: {
        "x": DATA.x, "y": DATA.y, "batch_size": SIZE, "steps_per_epoch": 4
    },
    "batches in steps": lambda: {"x": _in_batches(shuffle=True), "steps_per_epoch": 2},
    "loader in steps": lambda: {"x": _Loader(), "steps_per_epoch": 4},
    "generator in steps": lambda: {"x": _endless(), "steps_per_epoch": 4},
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Result:
    history: dict[str, list[float]]
    epochs: list[int]
    weights: list[np.ndarray]
    seen: _Seen
    stop: fit.EarlyStopping
    rate: float


_MODELS: dict[int, tuple[fit.Model, Any]] = {}


def _make_model(group: int) -> fit.Model:
    """Return a model as it is at the start of a script; its programs are compiled once."""
    if group not in _MODELS:
        model = fit.Model(_Net(), mirrored(2))
        model.compile("adam", _loss, [_error], steps_per_execution=group)
        _MODELS[group] = model, jax.tree.map(_copy, to_plain(model.objects()))
    model, begin = _MODELS[group]
    put_into(model.objects(), jax.tree.map(_copy, begin))
    model._passes = 0
    return model


def _copy(leaf: jax.Array) -> jax.Array:
    return jax.device_put(leaf.copy(), leaf.sharding)


def _run(
    folder: pathlib.Path,
    source: str,
    save_freq: Any,
    group: int = 1,
    kill: int | None = None,
    epochs: int = EPOCHS,
    **given: Any,
) -> _Result:
    """Train as a script does that is started with the same arguments each time."""
    model = _make_model(group)
    seen, stop = _Seen(), fit.EarlyStopping(patience=2, restore_best_weights=True)
    callbacks: list[fit.Callback] = [
        fit.ModelCheckpoint(folder / "saved", resume=True, save_freq=save_freq, keep=2),
        seen,
        stop,
        fit.LearningRateScheduler(lambda epoch, rate: rate * 0.7),
        fit.ReduceLROnPlateau(patience=1, factor=0.5),
        fit.CSVLogger(folder / "log.csv"),
        fit.JSONLogger(folder / "log.jsonl"),
    ]
    if kill is not None:
        callbacks.append(_Kill(kill))
    arguments: dict[str, Any] = {
        **SOURCES[source](),
        "epochs": epochs,
        "callbacks": callbacks,
        "validation_data": (HELD_OUT.x, HELD_OUT.y),
        "verbose": 0,
        **given,
    }
    history = model.fit(**arguments)
    rate = float(model.learning_rate)
    return _Result(history.history, history.epoch, model.get_weights(), seen, stop, rate)


def _loss(y_true: Any, y_pred: Any) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(y_pred, y_true)


def _error(y_true: Any, y_pred: Any) -> jax.Array:
    return abs(y_pred.argmax(-1) - y_true).astype("float32")


_WHOLE: dict[tuple[str, int], _Result] = {}


def _whole(tmp_path: pathlib.Path, source: str, group: int) -> _Result:
    """The run that nothing interrupts."""
    if (source, group) not in _WHOLE:
        _WHOLE[source, group] = _run(tmp_path / "whole", source, "epoch", group)
    return _WHOLE[source, group]


def _check_equal(got: _Result, wanted: _Result, folder: pathlib.Path) -> None:
    first = wanted.epochs.index(got.epochs[0])
    assert got.epochs == wanted.epochs[first:]
    for name, values in wanted.history.items():
        assert got.history[name] == values[first:], name
    for mine, theirs in zip(got.weights, wanted.weights, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert got.seen.batches == wanted.seen.batches
    assert got.seen.count == wanted.seen.count
    np.testing.assert_array_equal(got.seen.mean, wanted.seen.mean)
    assert (got.stop.best_epoch, got.rate) == (wanted.stop.best_epoch, wanted.rate)
    with (folder / "log.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [float(line["loss"]) for line in lines] == wanted.history["loss"]
    logged = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in logged] == wanted.epochs


ROWS = [
    (source, save_freq, group, kill)
    for source in SOURCES
    for save_freq in ("epoch", 1, 2, 5)
    for group in (1, 2)
    for kill in (1, 2, 3, 4, 5, 6, 7)
    if group == 1 or (save_freq != 5 and kill % 2 == 0)
]


@pytest.mark.parametrize("row", sampled(ROWS, 10, name=lambda row: "-".join(map(str, row))))
def test_an_interrupted_training_ends_as_one_that_was_not(
    row: tuple[str, Any, int, int], tmp_path: pathlib.Path
) -> None:
    source, save_freq, group, kill = row
    wanted = _whole(tmp_path, source, group)
    folder = tmp_path / "killed"
    try:
        _run(folder, source, save_freq, group, kill)
    except _Killed:
        pass
    else:
        assert kill > len(wanted.seen.batches)
        return
    _check_equal(_run(folder, source, save_freq, group), wanted, folder)


def test_a_training_that_is_interrupted_after_every_step_ends(tmp_path: pathlib.Path) -> None:
    wanted = _whole(tmp_path, "arrays", 1)
    for _ in range(STEPS * EPOCHS):
        with pytest.raises(_Killed):
            # The checkpoint of a step is written when the next one begins.
            _run(tmp_path, "arrays", 1, kill=2)
        if fit.ModelCheckpoint(tmp_path / "saved", save_freq=1).epochs_done() == EPOCHS - 1:
            break
    _check_equal(_run(tmp_path, "arrays", 1), wanted, tmp_path)


def test_the_number_of_epochs_is_the_total_also_in_one_process(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with mirrored(2).scope():
        model = fit.Model(nnx.Linear(DATA.x.shape[1], 3, rngs=nnx.Rngs(0)))
        model.compile("sgd", _loss)
    whole = fit.Model(nnx.Linear(DATA.x.shape[1], 3, rngs=nnx.Rngs(0)), mirrored(2))
    whole.compile("sgd", _loss)
    losses = whole.fit(DATA.x, DATA.y, SIZE, 4, verbose=0).history["loss"]
    save = fit.ModelCheckpoint(tmp_path / "one", resume=True)
    given: dict[str, Any] = {"batch_size": SIZE, "callbacks": [save], "verbose": 2}
    assert model.fit(DATA.x, DATA.y, epochs=2, **given).history["loss"] == losses[:2]
    capsys.readouterr()
    history = model.fit(DATA.x, DATA.y, epochs=4, **given)
    assert (history.epoch, history.history["loss"]) == ([2, 3], losses[2:])
    assert "resumes after epoch 2 (" in capsys.readouterr().out
    before = model.get_weights()
    assert model.fit(DATA.x, DATA.y, epochs=4, **given).epoch == []
    assert "all 4 epochs are trained: pass a higher epochs" in capsys.readouterr().out
    for mine, theirs in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_a_training_that_stopped_early_stays_so(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # With a metric that never becomes better, it ends after the third epoch.
    wanted = _run(tmp_path, "arrays", "epoch", epochs=9, verbose=2)
    assert len(wanted.epochs) < 9
    capsys.readouterr()
    again = _run(tmp_path, "arrays", "epoch", epochs=9, verbose=2)
    assert again.epochs == []
    assert "a callback ended this training after epoch" in capsys.readouterr().out
    assert again.stop.best_epoch == wanted.stop.best_epoch
    for mine, theirs in zip(again.weights, wanted.weights, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_a_checkpoint_of_another_model_changes_neither_model_nor_files(
    tmp_path: pathlib.Path,
) -> None:
    _run(tmp_path, "arrays", "epoch", epochs=1)
    logged = (tmp_path / "log.csv").read_text()
    model = make_model(mirrored(2))
    before = model.get_weights()
    save = fit.ModelCheckpoint(tmp_path / "saved", resume=True)
    log = fit.CSVLogger(tmp_path / "log.csv")
    with pytest.raises(CheckpointError, match="of another model or optimizer"):
        model.fit(DATA.x, DATA.y, SIZE, 3, callbacks=[log, save], verbose=0)
    for mine, theirs in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert (tmp_path / "log.csv").read_text() == logged


@pytest.mark.parametrize(("step", "shown"), [(1, "1 step"), (2, "2 steps")])
def test_steps_within_an_epoch_are_counted_in_words(
    step: int, shown: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saver = fit.ModelCheckpoint(tmp_path, save_freq=1, resume=True)
    position = Position(2, step=step)
    Start(position, [saver], saver, position, continues=True).tell(
        Progress(2, 4, 5), 4, has_ended=False
    )
    first = f"resumes after epoch 2 and {shown} of epoch 3 ("
    assert capsys.readouterr().out.startswith(first)


def test_an_initial_epoch_that_is_given_wins(tmp_path: pathlib.Path) -> None:
    _run(tmp_path, "arrays", "epoch", epochs=2)
    assert _run(tmp_path, "arrays", "epoch", epochs=6, initial_epoch=4).epochs == [4, 5]
    with pytest.raises(CheckpointError, match=r"given epoch=2[^0-9](.|\n)*leave out initial_epoch"):
        _run(tmp_path, "arrays", "epoch", epochs=9, initial_epoch=1)


def test_an_initial_epoch_that_is_given_trains_after_an_early_stop(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped = _run(tmp_path, "arrays", "epoch", epochs=9).epochs[-1] + 1
    again = _run(tmp_path, "arrays", "epoch", epochs=20, initial_epoch=stopped + 3, verbose=2)
    assert again.epochs[0] == stopped + 3
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"resumes after epoch {stopped + 3} (")
    assert lines[-1].startswith(f"Early stop after epoch {again.epochs[-1] + 1}: ")


class _Worth(fit.Callback):
    """Adds a value to the logs of each epoch."""

    def on_epoch_end(self, epoch: int, logs: Any) -> None:
        logs["worth"] = [5.0, 3.0, 4.0, 2.0][epoch]


@pytest.mark.parametrize("order", [("all", "best"), ("best", "all")])
def test_a_resumed_training_knows_the_best_value_of_each_callback(
    order: tuple[str, str], tmp_path: pathlib.Path
) -> None:
    model = make_model(mirrored(1))
    for epochs, saved in ((2, (1, 2)), (3, (1, 2)), (4, (1, 2, 4))):
        savers = {
            "all": fit.ModelCheckpoint(tmp_path / "all", resume=True),
            "best": fit.ModelCheckpoint(tmp_path / "best", "worth", True, "min"),
        }
        callbacks = [_Worth(), *(savers[name] for name in order)]
        model.fit(DATA.x, DATA.y, SIZE, epochs, callbacks=callbacks, verbose=0)
        with Checkpoints(tmp_path / "best") as best:
            assert best.steps() == saved


def test_a_checkpoint_that_another_program_deletes_is_an_error(tmp_path: pathlib.Path) -> None:
    class Delete(fit.Callback):
        def on_train_begin(self, logs: Any) -> None:
            with Checkpoints(tmp_path) as checkpoints:
                checkpoints.discard_after(self.left)

        def __init__(self, left: int) -> None:
            self.left = left

    model = make_model(mirrored(1))
    save = fit.ModelCheckpoint(tmp_path, resume=True)
    model.fit(DATA.x, DATA.y, SIZE, 3, callbacks=[save], verbose=0)
    for left, found in ((2, "2"), (0, "none")):
        with pytest.raises(CheckpointError, match=f"a moment later, {found} as the newest"):
            model.fit(DATA.x, DATA.y, SIZE, 4, callbacks=[Delete(left), save], verbose=0)


@pytest.mark.parametrize(("save_freq", "noun"), [("epoch", "epoch"), (2, "step")])
def test_a_folder_with_checkpoints_is_refused_without_resume(
    save_freq: Any, noun: str, tmp_path: pathlib.Path
) -> None:
    given: dict[str, Any] = {"batch_size": SIZE, "epochs": 2, "verbose": 0}
    model = fit.Model(nnx.Linear(DATA.x.shape[1], 3, rngs=nnx.Rngs(0)), mirrored(1))
    model.compile("sgd", _loss)
    log = fit.CSVLogger(tmp_path / "log.csv")
    saves = lambda: fit.ModelCheckpoint(tmp_path / "saved", save_freq=save_freq)  # noqa: E731
    model.fit(DATA.x, DATA.y, callbacks=[saves(), log], **given)
    before, logged = model.get_weights(), (tmp_path / "log.csv").read_text()
    with pytest.raises(CheckpointError, match=rf"given {noun}=1[^0-9](.|\n)*pass resume=True"):
        model.fit(DATA.x, DATA.y, callbacks=[log, saves()], **given)
    for mine, theirs in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert (tmp_path / "log.csv").read_text() == logged


def test_a_folder_that_is_numbered_the_other_way_is_refused(tmp_path: pathlib.Path) -> None:
    _run(tmp_path / "epochs", "arrays", "epoch", epochs=1)
    _run(tmp_path / "steps", "arrays", 2, epochs=2)
    with pytest.raises(CheckpointError, match=r"save_freq=2 and .*numbered by epochs"):
        _run(tmp_path / "epochs", "arrays", 2)
    with pytest.raises(CheckpointError, match=r"save_freq='epoch' and .*numbered by steps"):
        _run(tmp_path / "steps", "arrays", "epoch")
    assert fit.ModelCheckpoint(tmp_path / "steps" / "saved", save_freq=7).epochs_done() == 2
    with Checkpoints(tmp_path / "steps" / "saved") as checkpoints:
        assert checkpoints.steps() == (4, 6)


@pytest.mark.parametrize("save_freq", ["epoch", 2])
def test_a_checkpoint_whose_notes_are_damaged_has_no_number_of_epochs(
    save_freq: Any, tmp_path: pathlib.Path
) -> None:
    _run(tmp_path, "arrays", save_freq, epochs=2)
    folder = tmp_path / "saved"
    newest = max(int(path.name) for path in folder.iterdir() if path.name.isdigit())
    (folder / str(newest) / "notes" / "metadata").write_text("{")
    with pytest.raises(DamagedCheckpointError, match=rf"notes of checkpoint {newest} "):
        fit.ModelCheckpoint(folder, save_freq=save_freq).epochs_done()
    with pytest.raises(DamagedCheckpointError, match=rf"notes of checkpoint {newest} "):
        _run(tmp_path, "arrays", save_freq)


def test_the_newest_of_several_checkpoints_is_resumed(tmp_path: pathlib.Path) -> None:
    best = fit.ModelCheckpoint(tmp_path / "best", save_best_only=True, resume=True)
    with mirrored(2).scope():
        model = fit.Model(nnx.Linear(DATA.x.shape[1], 3, rngs=nnx.Rngs(0)))
        model.compile("sgd", _loss)
    given: dict[str, Any] = {
        "batch_size": SIZE, "verbose": 0, "validation_data": (HELD_OUT.x, HELD_OUT.y)
    }  # fmt: skip
    last = lambda: fit.ModelCheckpoint(tmp_path / "last", resume=True)  # noqa: E731
    model.fit(DATA.x, DATA.y, epochs=2, callbacks=[best, last()], **given)
    assert model.fit(DATA.x, DATA.y, epochs=3, callbacks=[best, last()], **given).epoch == [2]


def test_what_cannot_be_resumed_is_refused_before_the_first_step(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ArgumentError, match=r"save_best_only=True and save_freq=3"):
        fit.ModelCheckpoint(tmp_path, save_best_only=True, save_freq=3)
    for wrong in (0, -1, "epochs", 2.5, True):
        with pytest.raises((ArgumentError, ArgumentTypeError), match="save_freq"):
            fit.ModelCheckpoint(tmp_path, save_freq=wrong)  # type: ignore[arg-type]

    class Half(fit.Callback):
        def get_state(self) -> Any:
            return 1

    class Strange(Half):
        def get_state(self) -> Any:
            return {"made": [object()]}

        def set_state(self, state: Any) -> None:
            pass

    model = fit.Model(nnx.Linear(DATA.x.shape[1], 3, rngs=nnx.Rngs(0)), mirrored(1))
    model.compile("sgd", _loss)
    before = model.get_weights()
    for callback, text in (
        (Half(), "Half, which has get_state"),
        (Strange(), r"Strange.get_state returned a state with state\['made'\]\[0\]="),
    ):
        callbacks = [fit.ModelCheckpoint(tmp_path), callback]
        with pytest.raises(ArgumentTypeError, match=text):
            model.fit(DATA.x, DATA.y, callbacks=callbacks, verbose=0)
    for mine, theirs in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_another_dataset_or_other_metrics_within_an_epoch_are_refused(
    tmp_path: pathlib.Path,
) -> None:
    with pytest.raises(_Killed):
        _run(tmp_path, "arrays", 1, kill=3)
    with pytest.raises(ArgumentError, match="num_examples=20") as raised:
        _run(tmp_path, "arrays", 1, x=DATA.x[:16], y=DATA.y[:16])
    assert any("fit.Model.fit continues within an epoch" in n for n in raised.value.__notes__)
    with pytest.raises(ArgumentError, match="resumed after 2 batches of epoch 1, and read 0 more"):
        _run(tmp_path, "arrays", 1, steps_per_epoch=2)
    model = fit.Model(_Net(), mirrored(2))
    model.compile("adam", _loss)
    save = fit.ModelCheckpoint(tmp_path / "saved", resume=True, save_freq=1)
    with pytest.raises(CheckpointError, match=r"the checkpoint has loss, _error"):
        model.fit(DATA.x, DATA.y, SIZE, callbacks=[save], verbose=0)
    with pytest.raises(_Killed):
        _run(tmp_path / "loader", "loader", 1, kill=3)
    with pytest.raises(ArgumentError, match="continues after 2 batches of the dataset, which has"):
        _run(tmp_path / "loader", "loader", 1, x=iter(list(_rows(np.arange(20)))[:1]))


def _run_script(folder: pathlib.Path, steps: int) -> int:
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "tests.fit.resuming_script", str(folder), str(steps)]
    return subprocess.run(command, capture_output=True, timeout=120, check=False).returncode


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_script_that_is_killed_again_and_again_ends_as_one_that_is_not(
    tmp_path: pathlib.Path,
) -> None:
    assert _run_script(tmp_path / "whole", 0) == 0
    wanted = json.loads((tmp_path / "whole" / "result.json").read_text())
    # A checkpoint is complete or absent: a process that is killed after k steps has saved some of
    # the first k - 1.
    for steps in itertools.chain((1, 3), itertools.repeat(6)):
        code = _run_script(tmp_path / "killed", steps)
        if code == 0:
            break
        assert code == -signal.SIGKILL
    got = json.loads((tmp_path / "killed" / "result.json").read_text())
    assert got["weights"] == wanted["weights"]
    assert got["loss"] == wanted["loss"][-len(got["loss"]) :]


_STRATEGIES: dict[str, Callable[[], Any]] = {
    **{row.name: row.make for row in STRATEGIES},
    "a worker and two servers": lambda: make_strategy(servers=2, workers=1),
}


@pytest.mark.parametrize("name", sampled(list(_STRATEGIES), 5))
def test_every_strategy_resumes_within_an_epoch(name: str, tmp_path: pathlib.Path) -> None:
    def train(folder: str, *, kill: int = 0) -> Any:
        model = make_model(_STRATEGIES[name](), optimizer="adam")
        save = fit.ModelCheckpoint(tmp_path / folder, resume=True, save_freq=1)
        return model, model.fit(DATA.x, DATA.y, 8, 2, callbacks=[save, _Kill(kill)], verbose=0)

    model, history = train("whole")
    for kill in (2, 4):
        with pytest.raises(_Killed):
            train("killed", kill=kill)
    other, rest = train("killed")
    np.testing.assert_allclose(rest.history["loss"], history.history["loss"][-1:], rtol=1e-6)
    for mine, theirs in zip(other.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6, atol=1e-7)
