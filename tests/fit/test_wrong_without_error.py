"""Values of `fit.Model` that were wrong without an error: now right, or a named error."""

import csv
import json
import math
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxdist import data, fit
from jaxdist.errors import ArgumentError, ArgumentTypeError, ContextError, ShapeError
from tests.fit.models import make_data, make_model, mirrored

DATA = make_data(20)
X, Y = DATA.x, DATA.x[:, :1] * 2


class _Line(nnx.Module):
    """One dense layer, whose outputs may be given another form."""

    def __init__(self, form: Any = None) -> None:
        self.dense = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
        self._form = form

    def __call__(self, x: jax.Array) -> Any:
        out = self.dense(x)
        return out if self._form is None else self._form(out)


def _make(form: Any = None, replicas: int = 4, **kwargs: Any) -> fit.Model:
    return make_model(mirrored(replicas), _Line(form), **{"loss": "mse", **kwargs})


UNREAL = {
    "targets": (lambda: _make().evaluate(X, Y * 1j, verbose=0), "complex64 values"),
    "outputs": (
        lambda: _make(lambda out: out * 1j).evaluate(X, Y, verbose=0),
        "complex64 values",
    ),
    "a metric": (
        lambda: _make(metrics=[lambda t, p: (t - p) * 1j]).evaluate(X, Y, verbose=0),
        "complex64 values",
    ),
    "weights": (
        lambda: _make().fit(X, Y, sample_weight=np.full(20, 1j), verbose=0),
        "sample_weight of the dtype complex64",
    ),
    "weights of a dataset": (
        lambda: _make().fit([(X, Y, np.full(20, 1j))], verbose=0),
        "sample_weight of the dtype complex64",
    ),
}


@pytest.mark.parametrize("part", UNREAL)
def test_complex_numbers_are_refused_where_their_imaginary_part_would_be_lost(part: str) -> None:
    call, message = UNREAL[part]
    with pytest.raises(ArgumentTypeError, match=message):
        call()


class _Turned(fit.Metric):
    def sums(self, y_true: Any, y_pred: Any, weight: jax.Array) -> dict[str, jax.Array]:
        return {"total": jnp.sum(weight) * 1j}

    def result(self, sums: Any) -> float:
        return float(np.abs(sums["total"]))


def test_a_complex_sum_of_a_metric_is_refused() -> None:
    with pytest.raises(ArgumentTypeError, match="its sum 'total' is complex64"):
        _make(metrics=[_Turned("turned")]).evaluate(X, Y, verbose=0)


MODES = {
    "min": [
        *("loss", "val_loss", "mse", "mae", "root_mean_squared_error", "recall_loss", "top_loss"),
        *("desktop_mae", "accel_loss", "face_mse", "val_accident_error", "top_5_error", "val_NLL"),
        *("log_cosh", "huber", "accuracy_loss", "token_perplexity", "CrossEntropy"),
    ],
    "max": [
        *("accuracy", "val_acc", "top_5_accuracy", "precision", "recall", "auc", "AUC", "f1"),
        *("val_f1_score", "a_accuracy", "BinaryAccuracy", "acc1", "loss_accuracy", "top_k"),
        *("error_recall", "val_head_iou"),
    ],
}


@pytest.mark.parametrize(("mode", "name"), [(m, n) for m, names in MODES.items() for n in names])
@pytest.mark.parametrize("make", [fit.EarlyStopping, fit.ReduceLROnPlateau])
def test_the_best_value_of_a_name_is_that_of_its_last_word(make: Any, mode: str, name: str) -> None:
    monitor = make(monitor=name)._monitor
    monitor.best = 0.5
    assert monitor.is_better(0.25) == (mode == "min")
    assert monitor.is_better(0.75) == (mode == "max")


@pytest.mark.parametrize("name", ["val_bleu", "<lambda>", "f", "accident", "recallable", "score"])
@pytest.mark.parametrize(
    "make",
    [fit.EarlyStopping, fit.ReduceLROnPlateau, lambda **given: fit.ModelCheckpoint("x", **given)],
    ids=["stopping", "plateau", "checkpoint"],
)
def test_a_name_that_says_no_direction_needs_a_mode(make: Any, name: str) -> None:
    with pytest.raises(ArgumentError, match="Pass mode='min' or mode='max'"):
        make(monitor=name)
    assert make(monitor=name, mode="max")._monitor.is_better(-1e9)


class _Stub:
    """The part of a model that early stopping uses."""

    def __init__(self) -> None:
        self.stop_training, self.epoch = False, 0
        self.weights: int | None = None
        self.history, self.writes_logs, self.metrics = fit.History(), False, []

    def get_weights(self) -> int:
        return self.epoch

    def set_weights(self, weights: int) -> None:
        self.weights = weights


def _stop(callback: Any, values: list[float]) -> tuple[int | None, Any]:
    """Return the epoch of the stop, and that of the restored weights."""
    model = _Stub()
    callback.set_model(model)
    callback.set_params({"verbose": 0})
    callback.on_train_begin({})
    for model.epoch, value in enumerate(values):
        model.history.add(model.epoch, {"loss": value})
        callback.on_epoch_begin(model.epoch, {})
        callback.on_epoch_end(model.epoch, {"loss": value})
        if model.stop_training:
            break
    callback.on_train_end({})
    return (model.epoch if model.stop_training else None), model.weights


def test_early_stops_are_those_of_keras_for_any_baseline_and_patience(keras: Any) -> None:
    random = np.random.default_rng(0)
    stops = 0
    for _ in range(600):
        # Eighths: adding and subtracting min_delta is exact.
        values = (random.integers(-16, 17, 8) / 8).tolist()
        given: dict[str, Any] = {
            "monitor": "loss",
            "min_delta": float(random.choice([0, 0.5])),
            "patience": int(random.integers(4)),
            "mode": str(random.choice(["min", "max"])),
            "baseline": [None, -0.5, 0.0, 0.75][random.integers(4)],
            "restore_best_weights": bool(random.integers(2)),
            "start_from_epoch": int(random.choice([0, 2])),
        }
        found = _stop(fit.EarlyStopping(**given), values)
        assert found == _stop(keras.callbacks.EarlyStopping(**given), values), (given, values)
        stops += found[0] is not None
    assert stops > 100


INSIDE = {
    "compile": lambda model: model.compile(optax.sgd(0.0), "mae"),
    "fit": lambda model: model.fit(X, Y, verbose=0),
}


@pytest.mark.parametrize("method", INSIDE)
@pytest.mark.parametrize("when", ["on_train_begin", "on_train_batch_end", "on_epoch_end"])
def test_a_callback_neither_compiles_nor_fits_the_model_that_is_trained(
    method: str, when: str
) -> None:
    model = _make()
    call = fit.LambdaCallback(**{when: lambda *_: INSIDE[method](model)})
    with pytest.raises(ContextError, match=f"fit.Model.{method} was called while its fit runs"):
        model.fit(X, Y, verbose=0, callbacks=[call])
    # Outside of it both work again.
    INSIDE[method](model)
    assert len(model.fit(X, Y, verbose=0).history["loss"]) == 1


NO_ROWS = {
    "one for all": lambda out: out.sum(),
    "a constant": lambda out: jnp.ones(7),
    "a mean beside": lambda out: {"out": out, "mean": out.mean()},
    "a number beside": lambda out: (out, 3.0),
}


@pytest.mark.parametrize("form", NO_ROWS)
@pytest.mark.parametrize("replicas", [1, 4])
@pytest.mark.parametrize("kind", ["arrays", "batches", "distributed"])
def test_predict_refuses_outputs_that_are_not_one_for_each_example(
    form: str, replicas: int, kind: str
) -> None:
    model = _make(NO_ROWS[form], replicas)
    batches = [(X[:8],), (X,)]
    x = {
        "arrays": X,
        "batches": batches,
        "distributed": model.strategy.experimental_distribute_dataset(batches),
    }[kind]
    with pytest.raises(ShapeError, match="Return one output for each example"):
        model.predict(x, verbose=0)


@pytest.mark.parametrize("call", ["fit", "evaluate", "predict"])
@pytest.mark.parametrize("count", [1, 3])
def test_batches_without_any_example_are_an_error_and_no_nan(call: str, count: int) -> None:
    model, empty = _make(), (X[:0], Y[:0])
    with pytest.raises(ShapeError, match=rf"batches \({count}\).* have no examples"):
        getattr(model, call)([empty] * count, verbose=0)
    # One without examples among others counts for nothing.
    found = model.evaluate([(X, Y), empty], verbose=0)
    assert math.isclose(found, model.evaluate(X, Y, verbose=0), rel_tol=1e-6)
    assert len(model.predict([(X, Y), empty], verbose=0)) == len(X)


def _mean(name: str) -> fit.Metric:
    return fit.Mean(lambda y_true, y_pred: jnp.abs(y_true - y_pred), name)


TWICE: dict[str, dict[str, Any]] = {
    "an output and a metric": {
        "loss": {"a": "mse", "a_b": "mse"},
        "metrics": {"a": [_mean("b_mae")], "a_b": ["mae"]},
    },
    "a loss of an output": {
        "loss": {"a": "mse", "a_b": "mse"},
        "metrics": {"a": [_mean("b_loss")]},
    },
    "a number and a name": {"loss": {0: "mse", "output_0": "mae"}},
    "the prefix of a weighted metric": {
        "metrics": ["mae", _mean("weighted_mae")],
        "weighted_metrics": ["mae"],
    },
    "the loss of validation": {"metrics": [_mean("val_loss")]},
    "a metric of validation": {"metrics": ["mae"], "weighted_metrics": [_mean("val_mae")]},
}


@pytest.mark.parametrize("case", TWICE)
def test_two_values_of_one_name_are_refused_and_none_is_lost(case: str) -> None:
    with pytest.raises(ArgumentError, match="would be two values"):
        _make(**TWICE[case])
    _make(metrics=["mae", _mean("b_mae")], weighted_metrics=["mae"])


@pytest.mark.parametrize("losses", [["mse"], ["mse", None, "mse"], ("mse",)])
@pytest.mark.parametrize("call", ["fit", "evaluate"])
def test_a_list_of_losses_has_one_for_each_output(call: str, losses: Any) -> None:
    model = _make(lambda out: (out, 2 * out), loss=losses)
    with pytest.raises(ArgumentError, match=rf"{len(losses)} entries.* returns 2 outputs"):
        getattr(model, call)(X, (Y, Y, Y), verbose=0)
    model = _make(lambda out: (out, 2 * out), loss=["mse", None])
    assert model.evaluate(X, (Y, Y), verbose=0) > 0


def test_two_callbacks_do_not_save_into_one_directory(tmp_path: pathlib.Path) -> None:
    model, first = _make(), fit.ModelCheckpoint(tmp_path / "a")
    best = fit.ModelCheckpoint(tmp_path / "a", "loss", save_best_only=True)
    with pytest.raises(ArgumentError, match=r"2 callbacks ModelCheckpoint with the directory"):
        model.fit(X, Y, verbose=0, callbacks=[first, best])
    best = fit.ModelCheckpoint(tmp_path / "b", "loss", save_best_only=True)
    assert model.fit(X, Y, verbose=0, callbacks=[first, best]).epoch == [0]


@pytest.mark.parametrize("every", [1, 2, 3])
def test_a_csv_file_has_the_values_of_each_validation(tmp_path: pathlib.Path, every: int) -> None:
    path, model = tmp_path / "log.csv", _make(metrics=["mae"])
    history = model.fit(
        *(X, Y, 8),
        epochs=4,
        verbose=0,
        validation_split=0.2,
        validation_freq=every,
        callbacks=[fit.CSVLogger(path)],
    ).history
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for name, values in history.items():
        found = [row[name] for row in rows]
        assert [float(value) for value in found if value != "NA"] == values
        is_of_validation = [name.startswith("val_") for _ in rows]
        missing = [v and (epoch + 1) % every > 0 for epoch, v in enumerate(is_of_validation)]
        assert [value == "NA" for value in found] == missing


def test_a_value_without_a_column_of_the_csv_file_is_logged_once(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "log.csv"
    _make().fit(X, Y, verbose=0, callbacks=[fit.CSVLogger(path)])
    given: dict[str, Any] = {"epochs": 3, "verbose": 0, "validation_split": 0.2}
    _make().fit(X, Y, callbacks=[fit.CSVLogger(path, append=True)], **given)
    assert caplog.text.count("has no column for val_loss") == 1
    assert [line.count(",") for line in path.read_text().splitlines()] == [1] * 5


class _Numbered:
    """An iterator of batches whose targets are the number of the batch; it may have positions."""

    def __init__(self) -> None:
        self.number = 0

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        self.number += 1
        return X[:8] * 0, np.full((8, 1), float(self.number), np.float32)


class _WithPositions(_Numbered):
    def get_state(self) -> int:
        return self.number

    def set_state(self, state: int) -> None:
        self.number = state


def _square(numbers: Any) -> float:
    """Return the loss of an output of 0 for some batches."""
    return float(np.mean(np.square(numbers)))


@pytest.mark.parametrize("kind", [_Numbered, _WithPositions])
@pytest.mark.parametrize("replicas", [1, 4])
def test_an_iterator_loses_no_batch_between_calls(kind: Any, replicas: int) -> None:
    model, source = _make(replicas=replicas, optimizer=optax.sgd(0.0)), kind()
    given: dict[str, Any] = {"verbose": 0}
    assert model.evaluate(source, steps=2, **given) == _square([1, 2])
    assert model.predict(source, steps=3, **given).shape == (24, 1)
    history = model.fit(source, steps_per_epoch=2, epochs=2, **given).history
    assert history["loss"] == [_square([6, 7]), _square([8, 9])]
    history = model.fit(X, Y, epochs=3, validation_data=source, validation_steps=2, **given).history
    assert history["val_loss"] == [_square([10, 11]), _square([12, 13]), _square([14, 15])]
    assert source.number == 15


@pytest.mark.parametrize("kind", [_Numbered, _WithPositions])
def test_a_resumed_training_reads_all_that_it_needs_of_an_iterator(
    kind: Any, tmp_path: pathlib.Path
) -> None:
    def train(folder: pathlib.Path, epochs: int) -> tuple[list[float], int]:
        model, source = _make(optimizer=optax.sgd(0.0)), kind()
        save = fit.ModelCheckpoint(folder, resume=True, save_freq=1)
        given: dict[str, Any] = {"steps_per_epoch": 3, "epochs": epochs, "verbose": 0}
        return model.fit(source, callbacks=[save], **given).history["loss"], source.number

    first, number = train(tmp_path, 2)
    rest, end = train(tmp_path, 5)
    assert (number, end) == (6, 15)
    assert first + rest == [_square([n, n + 1, n + 2]) for n in (1, 4, 7, 10, 13)]


def test_random_keys_are_not_examples() -> None:
    keys = jax.random.split(jax.random.key(0), 8)
    with pytest.raises(ArgumentTypeError, match=r"x=Array"):
        _make().predict(keys, verbose=0)
    with pytest.raises(ArgumentTypeError, match=r"arrays\['k'\].* an array of key<fry>"):
        data.batches({"k": keys}, 4)


@pytest.mark.parametrize("kind", [bool, "int32", "uint8"])
def test_a_loss_without_a_gradient_is_refused(kind: Any) -> None:
    model = _make(loss=lambda y_true, y_pred: (y_true > y_pred)[:, 0].astype(kind))
    with pytest.raises(ArgumentTypeError, match="nothing would be trained"):
        model.fit(X, Y, verbose=0)


class _Factor(nnx.Module):
    def __init__(self, dtype: Any) -> None:
        self.dense = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
        self.factor = nnx.Param(jnp.ones((), dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.real(self.dense(x) * self.factor[...])


@pytest.mark.parametrize("dtype", ["int32", "complex64"])
def test_parameters_that_fit_would_train_wrongly_are_refused(dtype: str) -> None:
    model = make_model(mirrored(2), _Factor(dtype), loss="mse")
    with pytest.raises(ArgumentTypeError, match=f"whose parameter factor is {dtype}"):
        model.fit(X, Y, verbose=0)
    # Without training they are no harm.
    wanted = _make().evaluate(X, Y, verbose=0)
    assert math.isclose(model.evaluate(X, Y, verbose=0), wanted, rel_tol=1e-6)


def test_a_module_that_cannot_be_called_is_refused() -> None:
    class Table(nnx.Module):
        def __init__(self) -> None:
            self.w = nnx.Param(jnp.ones(3))

    # Its weights can be read and set.
    model = fit.Model(Table())
    assert [w.shape for w in model.get_weights()] == [(3,)]
    with pytest.raises(ArgumentTypeError, match=r"fit\.Model\.compile .* has no __call__"):
        model.compile(loss="mse")
    with pytest.raises(ArgumentTypeError, match=r"fit\.Model\.predict .* has no __call__"):
        model.predict(X)


@pytest.mark.parametrize("scale", [None, "float16"])
@pytest.mark.parametrize(
    "optimizer", [optax.lbfgs(), optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau())]
)
def test_an_optimizer_that_needs_more_than_gradients_is_named(
    optimizer: Any, scale: str | None
) -> None:
    model = _make(optimizer=optimizer, mixed_precision=scale)
    found = r"fit\.Model\.compile was given an optimizer whose update needs more than gradients"
    with pytest.raises(ArgumentTypeError, match=found) as error:
        model.fit(X, Y, verbose=0)
    assert "'value'" in str(error.value)
    assert "fit.ReduceLROnPlateau" in str(error.value)


@pytest.mark.parametrize("scale", [None, "float16"])
def test_masks_of_another_structure_are_an_error_of_compile(scale: str | None) -> None:
    masked = optax.masked(optax.sgd(0.1), {"dense": {"kernel": True, "bias": False}})
    with pytest.raises(ArgumentError, match=r"does not take the parameters of _Line"):
        _make(optimizer=masked, mixed_precision=scale)
    by_rank = optax.masked(
        optax.sgd(0.1), lambda params: jax.tree.map(lambda p: p.ndim > 1, params)
    )
    assert len(_make(optimizer=by_rank).fit(X, Y, verbose=0).history["loss"]) == 1


@pytest.mark.parametrize("value", [np.ones(3), "low", [1.0, 2.0]])
@pytest.mark.parametrize("make", [fit.EarlyStopping, fit.ReduceLROnPlateau])
def test_a_watched_value_is_a_number(make: Any, value: Any) -> None:
    change = fit.LambdaCallback(on_epoch_end=lambda epoch, logs: logs.update(own_loss=value))
    with pytest.raises(ArgumentTypeError, match="monitor='own_loss', and a callback has set it"):
        _make(optimizer="sgd").fit(X, Y, verbose=0, callbacks=[change, make("own_loss")])


@pytest.mark.parametrize("number", [np.float32(0.5), jnp.float32(0.5), np.array(0.5), 0.5])
def test_files_of_logs_take_numbers_of_numpy_and_jax(tmp_path: pathlib.Path, number: Any) -> None:
    change = fit.LambdaCallback(on_epoch_end=lambda epoch, logs: logs.update(own_loss=number))
    files = [fit.JSONLogger(tmp_path / "log.jsonl"), fit.CSVLogger(tmp_path / "log.csv")]
    best = fit.ModelCheckpoint(tmp_path / "best", "own_loss", save_best_only=True)
    stop = fit.EarlyStopping("own_loss", patience=1)
    history = _make().fit(X, Y, epochs=4, verbose=0, callbacks=[change, *files, best, stop])
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [row["own_loss"] for row in rows] == [0.5, 0.5]
    with (tmp_path / "log.csv").open(newline="") as file:
        assert [float(row["own_loss"]) for row in csv.DictReader(file)] == [0.5, 0.5]
    assert (history.epoch, stop.best_epoch, best.epochs_done()) == ([0, 1], 0, 1)
