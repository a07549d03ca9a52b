"""The script of all tasks of a job that trains a Keras model, as users write it.

`python server_script.py <version> <epochs>`. Lines of JSON tell the test what was found.
"""

import json
import os
import sys
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"

import keras
import numpy as np

import jaxdist
from jaxdist.cluster_resolver import TFConfigClusterResolver


def say(**found: object) -> None:
    """Tell the test."""
    print(json.dumps(found), flush=True)


class Wait(keras.callbacks.Callback):
    """Waits for the test after a few steps of the first epoch, while others are in the queue."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 10 and not self.has_waited:
            self.has_waited = True
            say(event="under way")
            sys.stdin.readline()

    has_waited = False


def main(version: str, epochs: int) -> None:
    """Train, and say what was counted."""
    resolver = TFConfigClusterResolver()
    if resolver.task_type == "ps" or (resolver.task_type == "worker" and version == "2"):
        # With a folder for snapshots, the only ones are those of new variables.
        jaxdist.Server(
            resolver.cluster_spec(), resolver.task_type, resolver.task_id, snapshot_seconds=1e6
        ).join()
        return
    of_version: dict[str, Any] = {
        "1": jaxdist.compat.v1.experimental.ParameterServerStrategy,
        "2": jaxdist.ParameterServerStrategy,
    }
    strategy = of_version[version](resolver)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(16, activation="relu"),
                keras.layers.Dropout(0.1),
                keras.layers.Dense(2, activation="softmax"),
            ]
        )
        model.compile(
            keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy", metrics=["accuracy"]
        )
    x = np.random.default_rng(0).normal(size=(320, 4)).astype("float32")
    y = (x[:, 0] > x[:, 1]).astype("int64")
    history = model.fit(x, y, batch_size=16, epochs=epochs, verbose=0, callbacks=[Wait()]).history
    steps = int(model.optimizer.iterations.value)
    loss, accuracy = model.evaluate(x, y, verbose=0)
    outputs = model.predict(x, verbose=0)
    if version == "2":
        found = jaxdist.coordinator.ClusterCoordinator(strategy).statistics()
        say(event="counted", applied=found.applied, scheduled=found.scheduled, lost=found.lost)
    own = float((outputs.argmax(axis=1) == y).mean())
    is_finite = all(bool(np.isfinite(x).all()) for x in model.get_weights())
    say(
        event="end",
        steps=steps,
        first=history["loss"][0],
        loss=loss,
        accuracy=accuracy,
        own=own,
        finite=is_finite,
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
