"""Recurrent layers that keep states for the next batch."""

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

import jaxdist
from jaxdist.errors import UnsupportedError
from tests.keras.models import make_strategy
from tests.parameter_server.strategy.making import make_strategy as make_server_strategy
from tests.strategies.oracle import refused

STEPS, FEATURES, BATCH = 4, 3, 8
X = np.random.default_rng(0).normal(size=(2 * BATCH, STEPS, FEATURES)).astype("float32")
Y = X[:, 0, :1]
LAYERS: dict[str, Callable[[], Any]] = {
    "GRU": lambda: layers.GRU(2, stateful=True),
    "LSTM": lambda: layers.LSTM(2, stateful=True),
    "SimpleRNN": lambda: layers.SimpleRNN(2, stateful=True),
    "RNN": lambda: layers.RNN([layers.GRUCell(3), layers.LSTMCell(2)], stateful=True),
    "Bidirectional": lambda: layers.Bidirectional(layers.GRU(2, stateful=True)),
}


def _make(strategy: Any, layer: Any, rows: int = BATCH) -> Any:
    with strategy.scope() if strategy else contextlib.nullcontext():
        given = keras.Input(batch_shape=(rows, STEPS, FEATURES))
        model = keras.Sequential([given, layer, layers.Dense(1)])
        model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize("rows", [BATCH, BATCH // 2])
@pytest.mark.parametrize("name", LAYERS)
def test_a_stateful_layer_is_refused_where_rows_are_split(name: str, rows: int) -> None:
    model = _make(make_strategy(2), LAYERS[name](), rows)
    for method in ("fit", "evaluate", "predict", "train_on_batch"):
        data = (X[:BATCH],) if method == "predict" else (X[:BATCH], Y[:BATCH])
        with refused(UnsupportedError, f"{method} of the Keras model", "stateful=True"):
            getattr(model, method)(*data)


def test_a_stateful_layer_is_refused_on_servers_whose_workers_are_not_in_step() -> None:
    model = _make(make_server_strategy(workers=1), LAYERS["GRU"]())
    with refused(UnsupportedError, "fit of the Keras model", "stateful=True"):
        model.fit(X, Y, batch_size=BATCH, verbose=0)


def test_a_stateful_layer_of_one_replica_gives_the_numbers_of_keras_alone() -> None:
    found = []
    for strategy in (make_strategy(1), None):
        keras.utils.set_random_seed(0)
        model = _make(strategy, LAYERS["GRU"]())
        history = model.fit(X, Y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history
        found.append(history["loss"])
    np.testing.assert_array_equal(*found)


def test_a_stateful_layer_is_refused_in_a_step_of_the_user() -> None:
    strategy, layer = make_strategy(2), layers.GRU(2, stateful=True)
    layer.build((BATCH // 2, STEPS, FEATURES))
    [batch] = strategy.experimental_distribute_dataset(jaxdist.data.batches(X[:BATCH], BATCH))
    with refused(UnsupportedError, "A step of 2 replicas calls", "stateful=True"):
        strategy.run(lambda x: layer(x), (batch,))
