"""Keras models on parameter servers of version 1, where each worker has a model of its own."""

import pathlib
from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np

import jaxdist
from tests.keras.models import check_equal, make_data
from tests.keras.on_servers.servers import make_model, read_state, train
from tests.parameter_server.strategy.version_1 import make_spec, make_worker, run_workers

K, L = keras.optimizers, keras.layers


def _run(script: Callable[[Any, int], Any]) -> list[Any]:
    def run(strategy: Any, number: int) -> Any:
        # The option of the fixture is that of one thread.
        with jax.numpy_rank_promotion("allow"):
            return script(strategy, number)

    return run_workers(run, make_spec())


def _make_layers() -> list[Any]:
    return [L.Dense(8), L.BatchNormalization(momentum=0.5), L.Dropout(0.5)]


def test_one_worker_gives_the_numbers_of_keras_alone() -> None:
    data, found = make_data(69), []
    for strategy in (make_worker(), None):
        model = make_model(strategy, lambda: K.Adam(0.01), _make_layers)
        found.append([train(model, data, batch_size=16), read_state(model)])
    check_equal(*found)


def test_a_worker_of_two_replicas_gives_the_numbers_of_keras_alone() -> None:
    data, found = make_data(69), []
    for strategy in (make_worker(replicas=2), None):
        found.append(train(make_model(strategy), data, batch_size=16))
    check_equal(*found)


def test_a_worker_without_a_cluster_gives_the_numbers_of_keras_alone() -> None:
    data, found = make_data(69), []
    alone = jaxdist.compat.v1.experimental.ParameterServerStrategy()
    for strategy in (alone, None):
        model = make_model(strategy, lambda: K.Adam(0.01))
        found.append([train(model, data, batch_size=16), read_state(model)])
    check_equal(*found)


def test_updates_of_two_workers_count_and_the_chief_writes_files(tmp_path: pathlib.Path) -> None:
    data = make_data(64)

    def script(strategy: Any, number: int) -> Any:
        model = make_model(strategy, layers=lambda: [L.Dense(8), L.Dropout(0.5)])
        file = tmp_path / f"{number}.keras"
        save = keras.callbacks.ModelCheckpoint(file)
        model.fit(data.x, data.y, batch_size=8, epochs=3, verbose=0, callbacks=[save])
        return int(model.optimizer.iterations.value)

    counts = _run(script)
    assert max(counts) == 48
    assert min(counts) >= 24
    assert [(tmp_path / f"{n}.keras").exists() for n in range(2)] == [True, False]


def test_two_workers_draw_other_random_numbers() -> None:
    x = np.ones((1, 5), "float32")

    def script(strategy: Any, number: int) -> Any:
        del number
        layers = lambda: [L.Dropout(0.5, seed=3)]  # noqa: E731
        model = make_model(strategy, lambda: K.SGD(0.0), layers)
        y = np.zeros(1, "int64")
        return [model.train_on_batch(x, y)[0] for _ in range(8)]

    first, second = _run(script)
    assert first != second
