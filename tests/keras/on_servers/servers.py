"""Strategies with parameter servers in this process, and what their models are compared with."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import keras

from tests.keras.models import CLASSES, FEATURES, Data

LOSS = "sparse_categorical_crossentropy"


def make_model(
    strategy: Any,
    optimizer: Callable[[], Any] = lambda: keras.optimizers.SGD(0.1),
    layers: Callable[[], Sequence[Any]] = lambda: [keras.layers.Dense(8, activation="relu")],
    **options: Any,
) -> Any:
    """Return a compiled model with the same first weights at each call."""
    keras.utils.set_random_seed(1)
    given = {"loss": LOSS, "metrics": ["accuracy"], **options}
    with strategy.scope() if strategy else contextlib.nullcontext():
        last = keras.layers.Dense(CLASSES, activation="softmax")
        model = keras.Sequential([keras.Input((FEATURES,)), *layers(), last])
        model.compile(optimizer(), **given)
    return model


def train(model: Any, data: Data, *, batch_size: int = 32, epochs: int = 2) -> dict[str, Any]:
    """Return everything that epochs of training, an evaluation and predictions compute."""
    keras.utils.set_random_seed(2)
    rows = {"batch_size": batch_size, "sample_weight": data.weights, "verbose": 0}
    validation = (data.x[:30], data.y[:30])
    history = model.fit(data.x, data.y, epochs=epochs, validation_data=validation, **rows)
    return {
        "history": history.history,
        "weights": model.get_weights(),
        "scores": model.evaluate(data.x, data.y, return_dict=True, **rows),
        "predictions": model.predict(data.x, batch_size=batch_size, verbose=0),
        "iterations": int(model.optimizer._iterations.value),
    }


def read_state(model: Any) -> list[Any]:
    """Return the values of the variables of the optimizer."""
    return [keras.ops.convert_to_numpy(v.value) for v in model.optimizer.variables]
