"""Keras in two processes with two devices each, against Keras in one."""

import functools
import pathlib
from typing import Any

import numpy as np
import pytest

from jaxdist.testing import launch
from tests.keras.models import check_equal, make_data, train

# Numbers of examples, sizes of batches, and whether there are weights.
CASES = [(1, 32, True), (7, 1, True), (100, 100, False), (1797, 100, True)]
LONG_CASES = [
    (1, 1, False), (7, 100, False), (13, 8, True), (100, 32, True), (1797, 100, False),
]  # fmt: skip


def _train_in_a_job(cases: list[tuple[int, int, bool]]) -> list[Any]:
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

    return [
        train(strategy, make_model, compile_model, make_data(count, weighted=weighted), size)
        for count, size, weighted in cases
    ]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "cases", [CASES, pytest.param(LONG_CASES, marks=pytest.mark.long)], ids=["few", "others"]
)
def test_two_processes_give_the_numbers_of_keras_alone(
    cases: list[tuple[int, int, bool]],
) -> None:
    import keras

    def make_model() -> Any:
        keras.utils.set_random_seed(1)
        return keras.Sequential([keras.Input((5,)), keras.layers.Dense(3, activation="softmax")])

    def compile_model() -> dict[str, Any]:
        return {"loss": "sparse_categorical_crossentropy", "metrics": ["accuracy"]}

    results = launch(
        functools.partial(_train_in_a_job, cases), 2, devices_per_process=2, timeout_seconds=300
    )
    for index, (count, size, weighted) in enumerate(cases):
        data = make_data(count, weighted=weighted)
        expected = train(None, make_model, compile_model, data, size)
        assert np.isfinite(expected["scores"]["loss"])
        for found in results:
            check_equal(found[index], expected)


def _train_with_files() -> Any:
    import os

    os.environ["KERAS_BACKEND"] = "jax"
    import keras

    import jaxdist

    folder = os.environ["FOLDER"]
    with jaxdist.MultiWorkerMirroredStrategy().scope():
        # Large enough that two writers of one file would meet.
        hidden = keras.layers.Dense(2000)
        model = keras.Sequential([keras.Input((5,)), hidden, keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    callbacks = [
        keras.callbacks.ModelCheckpoint(folder + "/best.keras", monitor="loss"),
        keras.callbacks.CSVLogger(folder + "/log.csv"),
        keras.callbacks.BackupAndRestore(folder + "/backup"),
    ]
    data = make_data(13)
    model.fit(data.x, np.ones((13, 1)), batch_size=8, epochs=4, verbose=0, callbacks=callbacks)
    restored = keras.saving.load_model(folder + "/best.keras")
    np.testing.assert_allclose(restored.get_weights()[0], model.get_weights()[0])


@pytest.mark.slow
def test_callbacks_write_their_files_in_process_0_and_all_can_read_them_after_fit(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOLDER", str(tmp_path))
    launch(_train_with_files, 2, timeout_seconds=200)
    lines = (tmp_path / "log.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["epoch", "0", "1", "2", "3"]
    assert not (tmp_path / "backup").exists()


# Kinds of state, aggregations, and sizes of batches; with 5 rows, replicas have different numbers.
STATES = [
    ("rows", "sum", 8), ("many_rows", "sum", 5), ("rows_as_integers", "sum", 5),
    ("steps", "none", 5), ("moving_mean", "mean", 5), ("first_value", "only_first_replica", 8),
    ("total", "none", 8),
]  # fmt: skip


def _keep_state_in_a_job() -> list[Any]:
    import os

    os.environ["KERAS_BACKEND"] = "jax"
    import jaxdist
    from tests.keras.test_own_state import Row, compute_state

    strategy = jaxdist.MultiWorkerMirroredStrategy()
    found: list[Any] = []
    for state, aggregation, batch in STATES:
        try:
            found.append(compute_state(Row(state, aggregation, 4, batch), strategy))
        except jaxdist.errors.StateDivergenceError as error:
            found.append(str(error))
    return found


@pytest.mark.slow
def test_two_processes_keep_the_state_of_own_layers_or_refuse_it() -> None:
    from tests.keras.test_own_state import Row, compute_state

    results = launch(_keep_state_in_a_job, 2, devices_per_process=2, timeout_seconds=300)
    for found in results:
        assert "kept: it has no aggregation" in found[-1]
        for (state, aggregation, batch), value in zip(STATES[:-1], found, strict=False):
            expected = compute_state(Row(state, aggregation, 4, batch), None)
            np.testing.assert_allclose(value, expected, rtol=1e-5)


# State that layers only add to: from zero, on two replicas of each of two workers.
ADDED = ("rows", "rows_as_integers", "many_rows", "total", "subtracted", "twice", "read_before")


def _add_to_state_in_a_job() -> list[Any]:
    import os

    os.environ["KERAS_BACKEND"] = "jax"
    import jaxdist
    from tests.keras.test_own_state import Row, compute_state

    strategy = jaxdist.MultiWorkerMirroredStrategy()
    return [compute_state(Row(s, "sum", 4, b), strategy) for s in ADDED for b in (8, 5)]


@pytest.mark.slow
def test_state_that_layers_add_to_in_two_processes_is_that_of_keras_alone() -> None:
    from tests.keras.test_own_state import Row, compute_state

    expected = [compute_state(Row(s, "sum", 1, b), None) for s in ADDED for b in (8, 5)]
    for found in launch(_add_to_state_in_a_job, 2, devices_per_process=2, timeout_seconds=300):
        for got, wanted in zip(found, expected, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-5)
