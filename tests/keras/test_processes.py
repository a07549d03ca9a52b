"""Keras in two processes with two devices each, against Keras in one."""

from typing import Any

import numpy as np
import pytest

from jaxdist.testing import launch
from tests.keras.models import check_equal, make_data, train


def _train_in_a_job() -> Any:
    import os

    os.environ["KERAS_BACKEND"] = "jax"
    import jax
    import keras

    import jaxdist

    strategy = jaxdist.MultiWorkerMirroredStrategy()

    def make_model() -> Any:
        # Other weights and another order of rows in each process, as without a seed.
        index = jax.process_index()
        keras.utils.set_random_seed(1 if index == 0 else 77)
        return keras.Sequential([keras.Input((5,)), keras.layers.Dense(3, activation="softmax")])

    def compile_model() -> dict[str, Any]:
        return {"loss": "sparse_categorical_crossentropy", "metrics": ["accuracy"]}

    return train(strategy, make_model, compile_model, make_data(13, weighted=True), 8)


@pytest.mark.slow
def test_two_processes_give_the_numbers_of_keras_alone() -> None:
    import keras

    def make_model() -> Any:
        keras.utils.set_random_seed(1)
        return keras.Sequential([keras.Input((5,)), keras.layers.Dense(3, activation="softmax")])

    def compile_model() -> dict[str, Any]:
        return {"loss": "sparse_categorical_crossentropy", "metrics": ["accuracy"]}

    expected = train(None, make_model, compile_model, make_data(13, weighted=True), 8)
    for found in launch(_train_in_a_job, 2, devices_per_process=2, timeout_seconds=300):
        check_equal(found, expected)
    assert np.isfinite(expected["scores"]["loss"])
