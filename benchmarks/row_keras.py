"""An epoch of a Keras model on a strategy costs what it costs in Keras alone.

Claim: an epoch of `keras.Model.fit` on the replicas of a strategy takes no longer than in Keras
without jaxdist on the same devices: Keras as it is on one device, and with
`keras.distribution.DataParallel` on eight. For a dense net, a small convolutional net, and a
transformer of 10 million parameters.

On one device the two programs have the same operations (`tests/keras/test_steps.py`). There a
third arm, Keras once more, shows by how much two processes with one program differ.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks._bench import Bench, arm
from benchmarks._lines import Line, Need
from benchmarks._loop import Loop
from benchmarks._steps import STEPS_IN_FLIGHT, strategy

ROW = "keras"
CLASSES = 10
# For each model: the shape of an example, and the rows of a batch.
SHAPES: dict[str, tuple[tuple[int, ...], int]] = {
    "Dense": ((64,), 256),
    "Convolutional": ((16, 16, 3), 64),
    "Transformer": ((32, 384), 16),
}


def _import_keras() -> Any:
    # Keras reads its backend once, when it is imported.
    os.environ["KERAS_BACKEND"] = "jax"
    import keras

    return keras


def _make_outputs(keras: Any, model: str, x: Any) -> Any:
    layers = keras.layers
    if model == "Dense":
        for _ in range(3):
            x = layers.Dense(256, activation="relu")(x)
    elif model == "Convolutional":
        for features in (16, 32):
            x = layers.Conv2D(features, 3, padding="same", activation="relu")(x)
            x = layers.MaxPooling2D(2)(x)
        x = layers.Flatten()(x)
    else:
        for _ in range(6):
            normed = layers.LayerNormalization()(x)
            x = x + layers.MultiHeadAttention(6, 64)(normed, normed)
            wide = layers.Dense(1536, activation="gelu")(layers.LayerNormalization()(x))
            x = x + layers.Dense(384)(wide)
        x = layers.GlobalAveragePooling1D()(x)
    return layers.Dense(CLASSES)(x)


def _make_wait(keras: Any) -> Any:
    """Return a callback that waits for a step every so often, as `STEPS_IN_FLIGHT` asks.

    It has no method that is called after a batch: Keras would then wait after each one.
    """

    class Wait(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            state = getattr(self.model, "_jax_state", None)
            if state and batch % STEPS_IN_FLIGHT == 0:
                jax.block_until_ready(list(state["metrics_variables"]))

    return Wait()


def _make_loop(keras: Any, model: str, scope: Any, callbacks: Sequence[Any] = ()) -> Loop:
    shape, batch = SHAPES[model]
    with scope():
        given = keras.Input(shape)
        net = keras.Model(given, _make_outputs(keras, model, given))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        net.compile(keras.optimizers.SGD(0.01), loss, metrics=["accuracy"])
    made: dict[int, Any] = {}

    def loop(steps: int) -> None:
        if steps not in made:
            rng = np.random.default_rng(0)
            x = rng.normal(size=(steps * batch, *shape)).astype("float32")
            made[steps] = x, rng.integers(0, CLASSES, len(x)).astype("int32")
        with scope():
            net.fit(*made[steps], batch, verbose=0, callbacks=list(callbacks))

    return Loop(loop)


def on_strategy(n: int, model: str) -> Loop:
    """An epoch on the replicas of a strategy."""
    return _make_loop(_import_keras(), model, strategy(n).scope)


def alone(n: int, model: str) -> Loop:
    """The same epoch in Keras without jaxdist."""
    keras = _import_keras()
    if n == 1:
        return _make_loop(keras, model, contextlib.nullcontext)
    names = [f"{device.platform}:{device.id}" for device in jax.devices()[:n]]
    scope = keras.distribution.DataParallel(devices=names).scope
    return _make_loop(keras, model, scope, [_make_wait(keras)])


def run(bench: Bench) -> Iterator[Line]:
    """Compare."""
    bursts = {"Dense": 200, "Convolutional": 60, "Transformer": 8}
    for model, steps in bursts.items():
        for n in bench.options.sizes(1, 8):
            arms = {
                "strategy": arm(on_strategy, n=n, model=model),
                "Keras": arm(alone, n=n, model=model),
            }
            if n == 1:
                arms["Keras again"] = arm(alone, n=n, model=model)
            race = bench.race(f"{model} N={n}", arms, bench.options.steps(steps))
            yield race.line("strategy", "Keras", Need(1.0))
            if n == 1:
                yield race.line("Keras again", "Keras", Need())
