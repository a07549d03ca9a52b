"""Batch statistics, random numbers, and what is left after training."""

import pathlib
import signal
from typing import Any

import jax
import keras
import numpy as np
import pytest
from keras import layers

from tests.keras.models import FEATURES, check_equal, make_data, make_strategy, train


@pytest.mark.slow
def test_synchronized_batch_statistics_are_those_of_one_device() -> None:
    data = make_data(11)

    def make_model(synchronized: bool) -> Any:
        return keras.Sequential(
            [
                keras.Input((FEATURES,)),
                layers.Dense(4),
                layers.BatchNormalization(synchronized=synchronized),
                layers.Dense(3, activation="softmax"),
            ]
        )

    def compile_model() -> dict[str, Any]:
        return {"loss": "sparse_categorical_crossentropy"}

    expected = train(None, lambda: make_model(False), compile_model, data, 9)
    for replicas in (3, 8):
        strategy = make_strategy(replicas)
        check_equal(train(strategy, lambda: make_model(True), compile_model, data, 9), expected)


class FoldsRows(layers.Layer):
    """A layer that normalizes parts of rows as if each was a row."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = layers.BatchNormalization(synchronized=True, momentum=0.5)

    def build(self, *_: Any) -> None:
        self.norm.build((None, 2))

    def call(self, *args: Any, training: bool = False, **_: Any) -> Any:
        (x,) = args
        parts = self.norm(keras.ops.reshape(x, (-1, 2)), training=training)
        return keras.ops.reshape(parts, (-1, x.shape[1]))


@pytest.mark.parametrize("replicas", [2, 8])
def test_synchronized_statistics_of_other_rows_than_those_of_the_batch(replicas: int) -> None:
    def make() -> Any:
        return keras.Sequential(
            [keras.Input((FEATURES,)), layers.Dense(6), FoldsRows(), layers.Dense(3)]
        )

    data = make_data(11)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    expected = train(None, make, lambda: {"loss": loss}, data, 9)
    check_equal(train(make_strategy(replicas), make, lambda: {"loss": loss}, data, 9), expected)


def test_synchronized_statistics_are_loaded_and_trained_without_a_scope(
    tmp_path: pathlib.Path,
) -> None:
    data, targets = make_data(13), np.ones((13, 2), "float32")
    with make_strategy(4).scope():
        norm = layers.BatchNormalization(synchronized=True)
        model = keras.Sequential([keras.Input((FEATURES,)), norm, layers.Dense(2)])
        model.compile("sgd", "mse")
    model.fit(data.x, targets, batch_size=8, verbose=0)
    expected = model.predict(data.x, verbose=0)
    saved = tmp_path / "model.keras"
    model.save(saved)
    loaded, copy = keras.saving.load_model(saved), keras.models.clone_model(model)
    copy.set_weights(model.get_weights())
    for other in (loaded, copy):
        assert other.layers[0].synchronized
        np.testing.assert_allclose(other.predict(data.x, verbose=0), expected, rtol=1e-5)
    # Without replicas, the statistics are those of all rows.
    model.fit(data.x, targets, batch_size=8, shuffle=False, verbose=0)
    loaded.fit(data.x, targets, batch_size=8, shuffle=False, verbose=0)
    for one, other in zip(model.get_weights(), loaded.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_moving_statistics_are_means_over_the_rows_of_all_replicas() -> None:
    x = make_data(5).x
    with make_strategy(8).scope():
        model = keras.Sequential(
            [keras.Input((FEATURES,)), layers.BatchNormalization(momentum=0.0)]
        )
        model.compile("sgd", "mse")
    # Three replicas have no row, and the variance of one row is zero.
    model.train_on_batch(x, x)
    norm = model.layers[0]
    np.testing.assert_allclose(norm.moving_mean, x.mean(0), rtol=1e-5)
    np.testing.assert_allclose(norm.moving_variance, np.zeros(FEATURES), atol=1e-6)


def test_dropout_differs_between_replicas_and_between_steps() -> None:
    with make_strategy(4).scope():
        model = keras.Sequential([keras.Input((64,)), layers.Dropout(0.5, seed=3)])
        model.compile(loss=lambda y_true, y_pred: y_pred)

        class Kept(keras.callbacks.Callback):
            pass

    drawn = [model.stateless_call([], _values(model), np.ones((1, 64)), training=True)[0]]
    state = model.layers[0].seed_generator.state
    before = np.asarray(state.value).copy()
    model.evaluate(np.ones((4, 64)), np.ones((4, 64)), verbose=0)
    assert np.array_equal(state.value, before), "evaluation draws nothing"
    assert np.asarray(drawn[0]).shape == (1, 64)


def _values(model: Any) -> list[Any]:
    return [v.value for v in model.non_trainable_variables]


def test_a_trained_model_can_be_saved_and_used_outside(tmp_path: pathlib.Path) -> None:
    data = make_data(13)
    # The loss of these weights becomes smaller in each epoch.
    keras.utils.set_random_seed(0)
    with make_strategy(4).scope():
        model = keras.Sequential([keras.Input((FEATURES,)), layers.Dense(2)])
        model.compile("adam", "mse")
    targets = np.ones((13, 2), "float32")
    saved = tmp_path / "best.keras"
    checkpoint = keras.callbacks.ModelCheckpoint(saved, save_best_only=True, monitor="loss")
    stop = keras.callbacks.EarlyStopping(monitor="loss", patience=1, restore_best_weights=True)
    model.fit(data.x, targets, batch_size=8, epochs=3, verbose=0, callbacks=[checkpoint, stop])
    predicted = model.predict(data.x, verbose=0)
    spread = [v.path for v in model.variables if len(v.value.sharding.device_set) > 1]
    assert not spread
    np.testing.assert_allclose(model(jax.device_put(data.x)), predicted, rtol=1e-5)
    restored = keras.saving.load_model(saved)
    np.testing.assert_allclose(restored.predict(data.x, verbose=0), predicted, rtol=1e-5)
    assert int(restored.optimizer.iterations.value) == 6


def test_ctrl_c_inside_of_a_step_takes_effect_after_it_and_the_model_goes_on() -> None:
    data = make_data(32)
    seen: list[Any] = []

    def make_model() -> Any:
        keras.utils.set_random_seed(0)
        with make_strategy(2).scope():
            model = keras.Sequential([keras.Input((FEATURES,)), layers.Dense(2)])
            model.compile("adam", "mse")
        model.fit(data.x[:8], targets[:8], batch_size=8, verbose=0)
        return model

    targets = np.ones((32, 2), "float32")
    model, other = make_model(), make_model()
    run = type(model.train_function).__call__

    def run_and_interrupt(self: Any, state: Any, batches: Any) -> Any:
        result = run(self, state, batches)
        seen.append(result)
        if len(seen) == 2:
            signal.raise_signal(signal.SIGINT)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model.train_function), "__call__", run_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            model.fit(data.x, targets, batch_size=8, shuffle=False, verbose=0)
    assert len(seen) == 2
    other.fit(data.x[:16], targets[:16], batch_size=8, shuffle=False, verbose=0)
    for one, two in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-6)
    assert int(model.optimizer.iterations.value) == 3
    assert np.isfinite(model.fit(data.x, targets, verbose=0).history["loss"][0])
