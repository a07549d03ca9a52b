"""`Estimator` of a Keras model."""

import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdist
from jaxdist import estimator as est
from jaxdist.errors import ArgumentError, ShapeError, UnsupportedError
from tests.estimator.models import RATE, X, Y, batches, descend
from tests.processes.job import results_of_job
from tests.strategies.oracle import refused

os.environ["KERAS_BACKEND"] = "jax"
keras = pytest.importorskip("keras")
layers = keras.layers

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ impl:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Explicitly requested dtype"),
]
_LABELS = Y[:, None]


@pytest.fixture(autouse=True)
def _rank_promotion() -> Iterator[None]:
    with jax.numpy_rank_promotion("allow"):
        yield


def _make_line(**compiled: Any) -> Any:
    line = layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((3,)), line])
    if compiled:
        model.compile(**compiled)
    return model


def _columns(size: int, rows: int = len(X)) -> Any:
    """Return batches whose labels are columns."""
    return lambda: [(x, y[:, None]) for x, y in batches(size, rows)()]


def _read(estimator: est.Estimator) -> np.ndarray:
    return np.asarray(estimator.get_variable_value("modules.model.trainable.0000_kernel"))[:, 0]


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_compiled_model_trains_as_numpy_and_a_module_do(
    replicas: int, tmp_path: pathlib.Path
) -> None:
    strategy = jaxdist.MirroredStrategy([f"cpu:{n}" for n in range(replicas)])
    config = est.RunConfig(train_distribute=strategy, eval_distribute=strategy)
    model = _make_line(optimizer=keras.optimizers.SGD(RATE), loss="mse", metrics=["mae"])
    estimator = est.Estimator(model, tmp_path, config)
    estimator.train(_columns(5))
    size = 5 * replicas
    groups = [(X[n : n + size], Y[n : n + size]) for n in range(0, len(X), size)]
    weights = descend(groups)
    np.testing.assert_allclose(_read(estimator), weights, rtol=1e-4, atol=1e-6)
    # The model that was given stays as it is.
    assert not np.asarray(model.trainable_variables[0].value).any()
    found = estimator.evaluate(_columns(7))
    errors = X @ weights - Y
    assert found["loss"] == pytest.approx((errors**2).mean(), rel=1e-4)
    assert found["mae"] == pytest.approx(np.abs(errors).mean(), rel=1e-4)
    assert found["global_step"] == len(groups)
    rows = list(estimator.predict(_columns(7)))
    np.testing.assert_allclose(np.stack(rows)[:, 0], X @ weights, rtol=1e-3, atol=1e-5)


def _make_deep() -> Any:
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((3,)),
            layers.Dense(8, activation="relu", kernel_regularizer="l2"),
            layers.BatchNormalization(momentum=0.5),
            layers.Dense(3),
        ]
    )


_CLASSES = (np.arange(len(X)) % 3).astype(np.int32)


def _compile(model: Any, optimizer: str = "adam") -> Any:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"])
    return model


def _classes(size: int) -> Any:
    return lambda: [(X[n : n + size], _CLASSES[n : n + size]) for n in range(0, len(X), size)]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adam", "sgd", "rmsprop", "adamw"])
def test_on_one_device_it_is_what_fit_of_keras_computes(
    optimizer: str, tmp_path: pathlib.Path
) -> None:
    estimator = est.Estimator(_compile(_make_deep(), optimizer), tmp_path)
    estimator.train(lambda: _classes(10)() * 3)
    model = _compile(_make_deep(), optimizer)
    model.fit(X, _CLASSES, batch_size=10, epochs=3, shuffle=False, verbose=0)
    expected = model.evaluate(X, _CLASSES, batch_size=7, verbose=0, return_dict=True)
    found = estimator.evaluate(_classes(7))
    for name in ("loss", "accuracy"):
        assert found[name] == pytest.approx(expected[name], rel=1e-4)
    rows = np.stack(list(estimator.predict(_classes(7))))
    np.testing.assert_allclose(rows, model.predict(X, verbose=0), rtol=1e-3, atol=1e-4)


def test_training_goes_on_with_the_state_of_the_optimizer_in_another_model(
    tmp_path: pathlib.Path,
) -> None:
    whole = est.Estimator(_compile(_make_deep()), tmp_path / "whole")
    whole.train(lambda: _classes(10)() * 2)
    parts = tmp_path / "parts"
    for _ in range(2):
        # Its layers have other names, since Keras counts them.
        est.Estimator(_compile(_make_deep()), parts).train(_classes(10))
    again = est.Estimator(_compile(_make_deep()), parts)
    names = whole.get_variable_names()
    assert names == again.get_variable_names()
    assert any(name.startswith("optimizer.opt_state") for name in names)
    for name in names:
        np.testing.assert_allclose(
            again.get_variable_value(name), whole.get_variable_value(name), rtol=1e-6, err_msg=name
        )


def test_an_optax_optimizer_and_a_loss_train_a_model_that_is_not_compiled(
    tmp_path: pathlib.Path,
) -> None:
    estimator = est.Estimator(
        _make_line(),
        tmp_path,
        loss=lambda predictions, labels: (predictions - labels) ** 2,
        optimizer=optax.sgd(RATE),
        metrics={"error": lambda p, y: jnp.abs(p - y)[:, 0]},
    )
    estimator.train(_columns(10))
    weights = descend(batches(10)())
    np.testing.assert_allclose(_read(estimator), weights, rtol=1e-4, atol=1e-6)
    found = estimator.evaluate(_columns(9))
    assert found["error"] == pytest.approx(np.abs(X @ weights - Y).mean(), rel=1e-4)


def test_an_export_gives_the_predictions_of_the_model(tmp_path: pathlib.Path) -> None:
    estimator = est.Estimator(_compile(_make_deep()), tmp_path / "model").train(_classes(10))
    path = estimator.export(tmp_path / "export", X[:1])
    expected = np.stack(list(estimator.predict(_classes(10))))
    found = est.load_export(path)(X)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_replicas_drop_out_different_values_and_moving_statistics_are_means(
    tmp_path: pathlib.Path,
) -> None:
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((3,)),
            layers.BatchNormalization(momentum=0.0),
            layers.Dropout(0.5, seed=3),
            layers.Dense(64, use_bias=False, kernel_initializer="ones", trainable=True),
        ]
    )
    # The gradient of the sum is what the dropout has left of each input.
    model.compile(optimizer=keras.optimizers.SGD(1.0), loss=lambda y, p: p[:, 0])
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    estimator = est.Estimator(model, tmp_path, est.RunConfig(train_distribute=strategy))
    estimator.train(lambda: [(X[:20], Y[:20]), (X[:20], Y[:20])])
    mean = estimator.get_variable_value("modules.model.fixed.0000_moving_mean")
    np.testing.assert_allclose(mean, X[:20].mean(0), atol=1e-5)
    one = est.Estimator(model, tmp_path / "one").train(lambda: [(X[:20], Y[:20])])
    kernel = "modules.model.trainable.0002_kernel"
    both, first = (np.asarray(e.get_variable_value(kernel))[:, 0] for e in (estimator, one))
    # With equal masks the mean over two equal batches would be the gradient of one.
    assert np.abs(both - first).max() > 1e-3


def test_a_model_trains_with_train_and_evaluate(tmp_path: pathlib.Path) -> None:
    model = _make_line(optimizer=keras.optimizers.SGD(RATE), loss="mse", metrics=["mae"])
    result, _ = est.train_and_evaluate(
        est.Estimator(model, tmp_path, est.RunConfig(save_checkpoints_steps=5)),
        est.TrainSpec(lambda: _columns(5)() * 10, max_steps=20),
        est.EvalSpec(_columns(10), throttle_secs=0),
    )
    assert result is not None
    assert result["global_step"] == 20
    assert list(est.experimental.read_eval_metrics(tmp_path / "eval")) == [5, 10, 15, 20]


def test_a_model_trains_with_parameter_servers_of_this_process(tmp_path: pathlib.Path) -> None:
    strategy = jaxdist.compat.v1.experimental.ParameterServerStrategy()
    model = _make_line(optimizer=keras.optimizers.SGD(RATE), loss="mse")
    estimator = est.Estimator(model, tmp_path, est.RunConfig(train_distribute=strategy))
    estimator.train(_columns(10))
    np.testing.assert_allclose(_read(estimator), descend(batches(10)()), rtol=1e-4, atol=1e-6)


def _average() -> Any:
    return _make_line(optimizer=keras.optimizers.SGD(0.1, use_ema=True), loss="mse")


def _scale() -> Any:
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    return _make_line(optimizer=optimizer, loss="mse")


@pytest.mark.parametrize(
    ("make", "error", "parts"),
    [
        (lambda: layers.Dense(1), ArgumentError, ["a Dense of Keras", "keras.Sequential"]),
        (_make_line, ArgumentError, ["the Keras model", "no loss", "a compiled model"]),
        (_average, UnsupportedError, ["use_ema=True", "optax.ema"]),
        (_scale, UnsupportedError, ["a LossScaleOptimizer", "mixed_bfloat16"]),
    ],
    ids=["a layer", "not compiled", "averages", "scaled loss"],
)
def test_what_cannot_be_trained_is_refused_at_once(make: Any, error: Any, parts: Any) -> None:
    with refused(error, "estimator.Estimator", *parts):
        est.Estimator(make(), "runs/never")


def test_a_metric_that_is_no_mean_is_refused_with_its_name(tmp_path: pathlib.Path) -> None:
    model = _make_line(optimizer="sgd", loss="mse", metrics=[keras.metrics.AUC(name="area")])
    with refused(UnsupportedError, "the metric 'area', a AUC", "the model's own evaluate"):
        est.Estimator(model, tmp_path).train(_columns(10))


def test_metrics_of_several_outputs_are_refused(tmp_path: pathlib.Path) -> None:
    x = keras.Input((3,))
    model = keras.Model(x, [layers.Dense(1)(x), layers.Dense(1)(x)])
    model.compile("sgd", loss=["mse", "mse"], metrics=[["mae"], ["mae"]])
    with refused(UnsupportedError, "metrics for 2 outputs"):
        est.Estimator(model, tmp_path).train(lambda: [(X, (_LABELS, _LABELS))])


def test_several_inputs_and_outputs_train_without_metrics(tmp_path: pathlib.Path) -> None:
    a, b = keras.Input((3,), name="a"), keras.Input((3,), name="b")
    line = layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Model({"a": a, "b": b}, [line(a), line(b)])
    model.compile(keras.optimizers.SGD(RATE / 2), loss=["mse", "mse"])
    estimator = est.Estimator(model, tmp_path)
    estimator.train(lambda: [({"a": X, "b": X}, (_LABELS, _LABELS))])
    np.testing.assert_allclose(_read(estimator), descend([(X, Y)]), rtol=1e-4, atol=1e-6)


def test_rows_that_are_masked_do_not_count(tmp_path: pathlib.Path) -> None:
    model = keras.Sequential(
        [
            keras.Input((2, 1)),
            layers.Masking(mask_value=-1.0),
            layers.Dense(1, use_bias=False, kernel_initializer="ones"),
        ]
    )
    model.compile(optimizer="sgd", loss="mse", metrics=["mae"])
    x = np.array([[[1.0], [-1.0]], [[2.0], [3.0]], [[4.0], [-1.0]]], np.float32)
    y = np.zeros((3, 2, 1), np.float32)
    estimator = est.Estimator(model, tmp_path).train(lambda: [(x * 0, y)])
    found = estimator.evaluate(lambda: [(x[:2], y[:2]), (x[2:], y[2:])])
    assert found["mae"] == pytest.approx(model.evaluate(x, y, verbose=0, return_dict=True)["mae"])


def test_a_model_that_its_first_batch_builds_trains(tmp_path: pathlib.Path) -> None:
    line = layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Sequential([line])
    model.compile(keras.optimizers.SGD(RATE), loss="mse", metrics=["mae"])
    estimator = est.Estimator(model, tmp_path).train(_columns(10))
    np.testing.assert_allclose(_read(estimator), descend(batches(10)()), rtol=1e-4, atol=1e-6)
    assert len(list(estimator.predict(_columns(10)))) == len(X)
    # Another process would predict with a model that no batch has built.
    fresh = keras.Sequential([layers.Dense(1, use_bias=False)])
    fresh.compile("sgd", loss="mse")
    rows = np.stack(list(est.Estimator(fresh, tmp_path).predict(_columns(10))))
    np.testing.assert_allclose(rows[:, 0], X @ _read(estimator), rtol=1e-4, atol=1e-5)


def test_synchronized_statistics_are_refused(tmp_path: pathlib.Path) -> None:
    with jaxdist.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        model = keras.Sequential(
            [keras.Input((3,)), layers.BatchNormalization(synchronized=True), layers.Dense(1)]
        )
        model.compile("sgd", loss="mse")
    with refused(UnsupportedError, "synchronized=True", "its own fit"):
        est.Estimator(model, tmp_path).train(_columns(10))


def test_a_model_without_variables_is_refused(tmp_path: pathlib.Path) -> None:
    model = keras.Sequential([keras.Input((3,)), layers.Flatten()])
    model.compile("sgd", loss="mse")
    with refused(ShapeError, "has no variables", "Dense"):
        est.Estimator(model, tmp_path).train(lambda: [(X, X)])


def test_a_model_without_labels_is_refused(tmp_path: pathlib.Path) -> None:
    model = _make_line(optimizer="sgd", loss="mse")
    with refused(ArgumentError, "input_fn yields features without labels", "pairs"):
        est.Estimator(model, tmp_path).train(lambda: [X[:5]])


_WITHOUT = """
import sys, tempfile
import numpy as np, optax
from flax import nnx
import jaxdist
from jaxdist import estimator as est
x = np.ones((4, 2), "float32")
estimator = est.Estimator(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), tempfile.mkdtemp(),
                          loss=optax.l2_loss, optimizer=optax.sgd(0.1))
estimator.train(lambda: [(x, x[:, :1])]).evaluate(lambda: [(x, x[:, :1])])
assert not [name for name in sys.modules if name.split(".")[0] == "keras"]
print("nothing of Keras")
"""


@pytest.mark.slow
def test_without_a_keras_model_nothing_of_keras_is_imported() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.stdout.strip().endswith("nothing of Keras"), done.stderr[-2000:]


_OTHER = """
import keras
import jaxdist
from jaxdist import estimator
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)], name="line")
try:
    estimator.Estimator(model, "runs/never")
except jaxdist.errors.UnsupportedError as error:
    result = str(error)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({"KERAS_BACKEND": "numpy", "KERAS_NNX_ENABLED": None}, "'numpy'"),
        ({"KERAS_BACKEND": "jax", "KERAS_NNX_ENABLED": "true"}, "KERAS_NNX_ENABLED"),
    ],
)
def test_a_model_of_another_backend_is_refused_with_what_to_set(
    environment: dict[str, str | None], found: str
) -> None:
    (said,) = results_of_job(_OTHER, 1, env=environment)
    assert f"given the Keras model 'line', and Keras uses {found}." in said
    assert "Start the program with KERAS_BACKEND=jax, and KERAS_NNX_ENABLED=false" in said
