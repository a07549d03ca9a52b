"""Loss, metrics, predictions and parameters are those of Keras on one device, for any split."""

import itertools
from typing import Any

import numpy as np
import pytest

import jaxdist
from jaxdist import fit
from tests.fit.models import CLASSES, FEATURES, HIDDEN, Data, Net, make_data, make_model, mirrored

EPOCHS = 2
NAMES = ("loss", "accuracy", "weighted_accuracy")


def _weights_of(net: Any) -> list[np.ndarray]:
    layers = (net.hidden, net.out)
    return [np.asarray(v[...]) for layer in layers for v in (layer.kernel, layer.bias)]


def _train_with_keras(keras: Any, data: Data, size: int, weight: Any) -> tuple[Any, ...]:
    layers = keras.layers
    model = keras.Sequential(
        [keras.Input((FEATURES,)), layers.Dense(HIDDEN, "relu"), layers.Dense(CLASSES)]
    )
    model.set_weights(_weights_of(Net()))
    model.compile(
        keras.optimizers.SGD(0.1),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        weighted_metrics=["accuracy"],
    )
    given: dict[str, Any] = {"batch_size": size, "verbose": 0, "sample_weight": weight}
    history = model.fit(data.x, data.y, epochs=EPOCHS, shuffle=False, **given).history
    result = model.evaluate(data.x, data.y, return_dict=True, **given)
    return (
        history,
        result,
        model.predict(data.x, verbose=0),
        [np.asarray(v.value) for v in model.weights],
    )


@pytest.mark.parametrize("is_weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize(
    ("count", "size"),
    [
        (1, 1), (7, 32), (7, 100), (100, 32),
        pytest.param(1797, 32, marks=pytest.mark.slow),
        *[
            pytest.param(*row, marks=[pytest.mark.long, pytest.mark.timeout(900)])
            for row in [(1, 32), (1, 100), (7, 1), (100, 1), (100, 100), (1797, 1), (1797, 100)]
        ],
    ],
)  # fmt: skip
def test_fit_evaluate_and_predict_are_those_of_keras_for_any_number_of_replicas(
    keras: Any, count: int, size: int, is_weighted: bool
) -> None:
    data = make_data(count)
    weight = data.weight if is_weighted else None
    history, result, outputs, weights = _train_with_keras(keras, data, size, weight)
    for replicas in (1, 3, 8):
        metrics = {"metrics": ["accuracy"], "weighted_metrics": ["accuracy"]}
        model = make_model(mirrored(replicas), **metrics)
        given: dict[str, Any] = {"batch_size": size, "verbose": 0, "sample_weight": weight}
        found = model.fit(data.x, data.y, epochs=EPOCHS, shuffle=False, **given).history
        logs = model.evaluate(data.x, data.y, return_dict=True, **given)
        for name in NAMES:
            np.testing.assert_allclose(found[name], history[name], rtol=1e-5, atol=1e-7)
            np.testing.assert_allclose(logs[name], result[name], rtol=1e-5, atol=1e-7)
        predicted = model.predict(data.x, size)
        np.testing.assert_allclose(predicted, outputs, rtol=1e-4, atol=1e-6)
        for one, other in zip(_weights_of(model.module), weights, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_class_weights_are_those_of_keras(keras: Any) -> None:
    data = make_data(50)
    classes = {0: 2.0, 2: 0.5}
    layers = keras.layers
    other = keras.Sequential(
        [keras.Input((FEATURES,)), layers.Dense(HIDDEN, "relu"), layers.Dense(CLASSES)]
    )
    other.set_weights(_weights_of(Net()))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    other.compile(keras.optimizers.SGD(0.1), loss)
    given: dict[str, Any] = {"batch_size": 16, "epochs": 2, "verbose": 0, "shuffle": False}
    wanted = other.fit(data.x, data.y, class_weight=classes, **given).history["loss"]
    model = make_model(mirrored(3))
    found = model.fit(data.x, data.y, class_weight=classes, **given).history["loss"]
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    # Without them, the same model and the same compiled steps have other losses.
    assert not np.allclose(model.fit(data.x, data.y, **given).history["loss"], wanted)


def test_an_evaluation_before_and_between_epochs_changes_no_number() -> None:
    data = make_data(20)
    plain = make_model(mirrored(8), metrics=["accuracy"], weighted_metrics=["accuracy"])
    other = make_model(mirrored(8), metrics=["accuracy"], weighted_metrics=["accuracy"])
    other.evaluate(data.x, data.y, verbose=0)
    given: dict[str, Any] = {
        "batch_size": 6,
        "epochs": 3,
        "verbose": 0,
        "sample_weight": data.weight,
    }
    wanted = plain.fit(data.x, data.y, **given).history
    found = other.fit(data.x, data.y, validation_data=(data.x, data.y), **given).history
    for name in NAMES:
        np.testing.assert_allclose(found[name], wanted[name], rtol=1e-6)


@pytest.mark.parametrize("replicas", [1, 3, 8])
@pytest.mark.parametrize("count", [7, 32, 33, 100])
def test_several_steps_of_one_dispatch_are_those_of_single_ones(replicas: int, count: int) -> None:
    data = make_data(count)
    found = []
    for steps in (1, 3):
        model = make_model(mirrored(replicas), steps_per_execution=steps, metrics=["accuracy"])
        history = model.fit(data.x, data.y, 8, epochs=2, verbose=0).history
        found.append((history, model.get_weights()))
    for name in ("loss", "accuracy"):
        np.testing.assert_allclose(found[0][0][name], found[1][0][name], rtol=1e-6)
    for one, other in zip(found[0][1], found[1][1], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


def test_weights_of_single_values_are_those_of_numpy() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(10, 5, FEATURES)).astype(np.float32)
    y = rng.integers(0, CLASSES, size=(10, 5)).astype(np.int32)
    weight = rng.uniform(size=(10, 5)).astype(np.float32)
    model = make_model(mirrored(3), metrics=["accuracy"])
    loss, accuracy = model.evaluate(x, y, 4, sample_weight=weight, verbose=0)
    logits = np.asarray(model.module(x), np.float64)
    log_sums = np.log(np.exp(logits).sum(-1))
    losses = log_sums - np.take_along_axis(logits, y[..., None], -1)[..., 0]
    np.testing.assert_allclose(loss, (weight * losses).mean(), rtol=1e-5)
    np.testing.assert_allclose(accuracy, (logits.argmax(-1) == y).mean(), rtol=1e-6)


def test_the_order_of_examples_depends_on_the_seed_and_the_epoch_alone() -> None:
    data = make_data(30)
    runs = []
    for replicas, seed in itertools.product((1, 8), (0, 0, 1)):
        model = make_model(mirrored(replicas))
        history = model.fit(data.x, data.y, 8, epochs=3, verbose=0, seed=seed)
        runs.append(history.history["loss"])
    for one in (1, 3, 4):
        np.testing.assert_allclose(runs[one], runs[0], rtol=1e-5)
    assert not np.allclose(runs[0], runs[2])
    np.testing.assert_allclose(runs[5], runs[2], rtol=1e-5)


def test_training_that_goes_on_from_an_epoch_is_that_which_was_not_interrupted() -> None:
    data = make_data(30)
    whole, parts = make_model(mirrored(3)), make_model(mirrored(3))
    wanted = whole.fit(data.x, data.y, 8, epochs=4, verbose=0).history["loss"]
    first = parts.fit(data.x, data.y, 8, epochs=2, verbose=0).history["loss"]
    rest = parts.fit(data.x, data.y, 8, epochs=4, initial_epoch=2, verbose=0)
    np.testing.assert_allclose(first + rest.history["loss"], wanted, rtol=1e-6)
    assert rest.epoch == [2, 3]


def test_a_model_without_a_scope_trains_on_one_device() -> None:
    data = make_data(10)
    model = fit.Model(Net())
    model.compile("sgd", "mse")
    one_hot = np.eye(CLASSES, dtype=np.float32)[data.y]
    assert model.strategy is jaxdist.get_strategy()
    assert len(model.fit(data.x, one_hot, verbose=0).history["loss"]) == 1
