"""Which strategy a model has, and errors that say what to change."""

from typing import Any

import keras
import numpy as np

import jaxdist
from jaxdist.errors import (
    MixedStrategyError,
    StateDivergenceError,
    UnsupportedError,
)
from tests.keras.models import make_strategy
from tests.strategies.oracle import refused

X, Y = np.ones((4, 2), "float32"), np.ones((4, 1), "float32")


def _make_model() -> Any:
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])


def test_a_model_of_another_scope_is_refused() -> None:
    with make_strategy(2).scope():
        model = _make_model()
    with make_strategy(3).scope(), refused(MixedStrategyError, "compiled in the scope", "made in"):
        model.compile("sgd", "mse")


def test_fit_in_a_scope_of_a_model_that_was_made_outside_is_refused() -> None:
    model = _make_model()
    model.compile("sgd", "mse")
    with make_strategy(2).scope(), refused(MixedStrategyError, "outside of every scope"):
        model.fit(X, Y, verbose=0)


def test_a_model_that_is_compiled_in_a_scope_trains_there() -> None:
    model = _make_model()
    with make_strategy(2).scope():
        model.compile("sgd", "mse")
    assert np.isfinite(model.fit(X, Y, verbose=0).history["loss"][0])


def test_datasets_of_jaxdist_are_refused_with_what_to_pass() -> None:
    strategy = make_strategy(2)
    with strategy.scope():
        model = _make_model()
        model.compile("sgd", "mse")
    batches = jaxdist.data.batches((X, Y), 3)
    distributed = strategy.experimental_distribute_dataset(batches)
    for source in (batches, distributed, iter(distributed)):
        with refused(UnsupportedError, "fit of the Keras model", "(batch for batch in batches)"):
            model.fit(source, verbose=0)
    with refused(UnsupportedError, "fit of the Keras model", "x, y, batch_size"):
        model.fit(X, Y, validation_data=batches, verbose=0)
    given = (batch for batch in batches)
    history = model.fit(given, steps_per_epoch=2, shuffle=False, verbose=0).history
    assert np.isfinite(history["loss"][0])


def test_logs_that_differ_between_replicas_are_refused() -> None:
    class Own(keras.Model):
        def test_step(self, state: Any, data: Any) -> Any:
            return {"mine": data[0].mean()}, state

    with make_strategy(2).scope():
        given = keras.Input((2,))
        model = Own(given, keras.layers.Dense(1)(given))
        model.compile("sgd", "mse")
    with refused(StateDivergenceError, "test_step", "['mine']", "all_reduce"):
        model.evaluate(np.arange(8.0).reshape(4, 2), Y, verbose=0)


def test_a_train_step_that_reduces_nothing_is_refused() -> None:
    class Own(keras.Model):
        def train_step(self, state: Any, data: Any) -> Any:
            x, _ = data
            trainable, *rest = state
            return {"loss": x.mean() * 0 + 1}, ([v + x.sum() for v in trainable], *rest)

    with make_strategy(2).scope():
        given = keras.Input((2,))
        model = Own(given, keras.layers.Dense(1)(given))
        model.compile("sgd", "mse")
    with refused(StateDivergenceError, "train_step of the Keras model", "kernel", "all_reduce"):
        model.fit(np.arange(8.0).reshape(4, 2), Y, verbose=0)
