"""Metrics of Keras in steps of the user: the value of all rows, or a named error."""

import contextlib
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

import jaxdist
from jaxdist.errors import StateDivergenceError
from tests.keras.models import make_strategy
from tests.strategies.oracle import refused

ROWS = 15
VALUES = np.linspace(0, 1, ROWS).astype("float32")


def _run(update: Any, strategy: Any, size: int = ROWS) -> None:
    batches = jaxdist.data.batches(VALUES[:size], 8)
    for batch in strategy.experimental_distribute_dataset(batches):
        strategy.run(update, (batch,))


def _gather(x: Any) -> Any:
    return jaxdist.get_replica_context().all_gather(x, axis=0)


@pytest.mark.parametrize("size", [ROWS, 8])
def test_a_metric_with_the_rows_of_one_replica_is_refused_with_ways_that_work(size: int) -> None:
    strategy = make_strategy(2)
    with strategy.scope():
        metric = keras.metrics.Mean()
    with refused(StateDivergenceError, "mean/total", "metrics of Keras", "jaxdist.fit", "gather"):
        _run(lambda x: metric.update_state(x), strategy, size)
    assert float(metric.result()) == 0


def test_a_metric_is_updated_with_the_rows_of_all_replicas() -> None:
    strategy = make_strategy(2)
    with strategy.scope():
        metric, outside = keras.metrics.Mean(), keras.metrics.Mean()
    _run(lambda x: metric.update_state(_gather(x)), strategy)
    np.testing.assert_allclose(metric.result(), VALUES.mean(), rtol=1e-6)
    for batch in strategy.experimental_distribute_dataset(jaxdist.data.batches(VALUES, 8)):
        outside.update_state(strategy.gather(strategy.run(lambda x: x + 0, (batch,)), axis=0))
    np.testing.assert_allclose(outside.result(), VALUES.mean(), rtol=1e-6)


@pytest.mark.parametrize("eagerly", [False, True])
@pytest.mark.parametrize("kind", [keras.metrics.F1Score, keras.metrics.R2Score])
def test_a_metric_makes_its_variables_in_the_first_step(kind: Any, eagerly: bool) -> None:
    random = np.random.default_rng(0)
    y, y_pred = random.normal(size=(2, 7, 3)).astype("float32")
    strategy, metric = make_strategy(2), kind()

    def step(y: Any, y_pred: Any) -> None:
        metric.update_state(_gather(y), _gather(y_pred))

    with jaxdist.config.run_eagerly() if eagerly else contextlib.nullcontext():
        for batch in strategy.experimental_distribute_dataset([(y, y_pred)] * 2):
            strategy.run(step, batch)
    expected = kind()
    for _ in range(2):
        expected.update_state(y, y_pred)
    np.testing.assert_allclose(metric.result(), expected.result(), rtol=1e-5)


def test_an_optimizer_makes_its_variables_in_the_first_step_op_by_op() -> None:
    strategy, optimizer = make_strategy(2), keras.optimizers.Adam(0.1)
    layer: Any = layers.Dense(1, kernel_initializer="ones")
    layer.build((None, 2))
    with jaxdist.config.run_eagerly():
        strategy.run(lambda: optimizer.apply([ops.ones((2, 1)), ops.ones(1)], layer.weights))
    assert int(optimizer.iterations.value) == 1
    np.testing.assert_allclose(layer.kernel.value, [[0.9], [0.9]], rtol=1e-5)


def _all_reduce(value: Any) -> Any:
    return jaxdist.get_replica_context().all_reduce("sum", value)


# Of two replicas with four rows each.
COUNTED: dict[str, tuple[Any, float | None]] = {
    "rows": (lambda m, x: m.update_state(x.shape[0]), None),
    "ones": (lambda m, x: m.update_state(ops.ones_like(x)), None),
    "a number": (lambda m, x: m.update_state(1), None),
    "rows of all": (lambda m, x: m.update_state(_all_reduce(x.shape[0])), 8),
    "rows of all, as floats": (lambda m, x: m.update_state(_all_reduce(1.0 * x.shape[0])), 8),
    "gathered rows": (lambda m, x: m.update_state(_gather(x) * 0 + 1), 8),
    "said to be of all": (lambda m, x: m.update_state(jaxdist.assume_replicated(8.0)), 8),
    "reset": (lambda m, x: m.reset_state(), 0),
    "not changed": (lambda m, x: None, 0),
}


@pytest.mark.parametrize("eagerly", [False, True])
@pytest.mark.parametrize("name", COUNTED)
def test_a_count_of_one_replica_is_not_added_once_for_all(name: str, eagerly: bool) -> None:
    update, expected = COUNTED[name]
    strategy = make_strategy(2)
    with strategy.scope():
        metric = keras.metrics.Sum()
    with jaxdist.config.run_eagerly() if eagerly else contextlib.nullcontext():
        if expected is None:
            with refused(StateDivergenceError, "2 replicas", "1.0 * x.shape[0]", "outside"):
                _run(lambda x: update(metric, x), strategy, 8)
            return
        _run(lambda x: update(metric, x), strategy, 8)
    assert float(metric.result()) == expected


@pytest.mark.parametrize("eagerly", [False, True])
def test_a_mean_of_a_constant_is_that_constant(eagerly: bool) -> None:
    strategy = make_strategy(2)
    with strategy.scope():
        metric = keras.metrics.Mean()
    with jaxdist.config.run_eagerly() if eagerly else contextlib.nullcontext():
        _run(lambda x: metric.update_state(x.shape[0]), strategy, 8)
    assert float(metric.result()) == 4
