"""State of a user's layer: the values of Keras alone, or an error with the name of the variable."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

import jaxdist
from jaxdist.errors import StateDivergenceError
from tests.keras import split
from tests.keras.models import make_strategy
from tests.strategies.oracle import refused
from tests.tables import sampled

ROWS, FEATURES = 22, 3
X = np.random.default_rng(0).integers(-4, 9, (ROWS, FEATURES)).astype("float32")


@dataclasses.dataclass(frozen=True)
class State:
    """A kind of state.

    Args:
        update: Assigns the variable, given the rows; returns what the layer returns.
        right: The aggregations with which it is the value of Keras alone; None: all of them.
        dtype: Its dtype.
        start: Its first value.
    """

    update: Callable[[Any, Any], Any]
    right: tuple[str, ...] | None
    dtype: str = "float32"
    start: float = 0.0


def _then(assigned: Any, x: Any) -> Any:
    del assigned
    return x


def _read_again(v: Any, x: Any) -> Any:
    v.assign_add(ops.sum(x))
    return x / (1.0 + ops.abs(v.value))


def _twice(v: Any, x: Any) -> Any:
    v.assign_add(ops.sum(x))
    v.assign_add(2.0 * ops.sum(ops.abs(x)))
    return x


def _read_before(v: Any, x: Any) -> Any:
    old = v.value
    v.assign_add(ops.sum(ops.abs(x)))
    return x + 0.001 * old


STATES = {
    "steps": State(lambda v, x: _then(v.assign_add(1.0), x), None),
    "steps_as_integers": State(lambda v, x: _then(v.assign_add(1), x), None, "int32"),
    "constant": State(lambda v, x: _then(v.assign(3.0), x), None),
    "decay": State(lambda v, x: _then(v.assign(0.9 * v + 0.5), x), None),
    "flag": State(lambda v, x: _then(v.assign(True), x), None, "bool"),
    "rows": State(lambda v, x: _then(v.assign_add(float(x.shape[0])), x), ("sum",)),
    "rows_as_integers": State(
        lambda v, x: _then(v.assign_add(ops.shape(x)[0]), x), ("sum",), "int32"
    ),
    "many_rows": State(
        lambda v, x: _then(v.assign_add(2.0 * x.shape[0]), x), ("sum",), "float32", 2.0**24
    ),
    "ones": State(lambda v, x: _then(v.assign_add(ops.sum(ops.ones_like(x))), x), ("sum",)),
    "total": State(lambda v, x: _then(v.assign_add(ops.sum(x)), x), ("sum",)),
    "subtracted": State(lambda v, x: _then(v.assign_sub(ops.sum(x)), x), ("sum",)),
    "sometimes": State(
        lambda v, x: _then(v.assign(ops.where(v.value < 1e6, v + ops.sum(x), v.value)), x), ()
    ),
    "last_total": State(lambda v, x: _then(v.assign(ops.sum(x)), x), ()),
    "twice": State(_twice, ("sum",)),
    "read_before": State(_read_before, ("sum",)),
    "largest": State(lambda v, x: _then(v.assign(ops.maximum(v, ops.max(x))), x), ()),
    "moving_mean": State(lambda v, x: _then(v.assign(0.9 * v + 0.1 * ops.mean(x)), x), ("mean",)),
    "last_mean": State(lambda v, x: _then(v.assign(ops.mean(x)), x), ("mean",)),
    "first_value": State(lambda v, x: _then(v.assign(x[0, 0]), x), ("only_first_replica",)),
    "read_again": State(_read_again, ()),
}
AGGREGATIONS = ("none", "sum", "mean", "only_first_replica")


class Keeps(layers.Layer):
    """A layer with a state."""

    def __init__(self, state: State, aggregation: str, options: str = "") -> None:
        super().__init__(dtype="mixed_bfloat16" if "bfloat16" in options else None)
        self.kind, self.aggregation = state, aggregation
        self.is_cast = options != "-float32_of_bfloat16"

    def build(self, *_: Any) -> None:
        kind = self.kind
        start = keras.initializers.Constant(kind.start)
        self.state = self.add_weight(
            shape=(),
            initializer="zeros" if kind.dtype == "bool" else start,
            trainable=False,
            dtype=kind.dtype,
            name="kept",
            aggregation=self.aggregation,
            autocast=self.is_cast,
        )

    def call(self, *args: Any, **_: Any) -> Any:
        (x,) = args
        # Keras looks for the shapes with a number of rows that is unknown.
        return self.kind.update(self.state, x) if isinstance(x.shape[0], int) else x


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of the table."""

    state: str
    aggregation: str
    replicas: int
    batch: int
    method: str = "fit"
    options: str = ""

    def __str__(self) -> str:
        rest = f"{self.replicas}-{self.batch}-{self.method}{self.options}"
        return f"{self.state}-{self.aggregation}-{rest}"


METHODS = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")
OPTIONS = ("-two_steps", "-eagerly", "-logical", "-bfloat16", "-float32_of_bfloat16")
TABLE = [
    Row(s, a, r, b) for s in STATES for a in AGGREGATIONS for r in (1, 2, 4, 8) for b in (8, 12, 5)
]
TABLE += [Row(s, a, 2, b, m) for s in STATES for a in AGGREGATIONS for m in METHODS for b in (8, 7)]
TABLE += [Row(s, a, 2, 8, "fit", o) for s in STATES for a in AGGREGATIONS for o in OPTIONS]


def _make_strategy(row: Row, replicas: int) -> jaxdist.Strategy:
    return (
        split.make_strategy(replicas, 2) if row.options == "-logical" else make_strategy(replicas)
    )


def _train(row: Row, replicas: int | None) -> Any:
    return compute_state(row, None if replicas is None else _make_strategy(row, replicas))


def compute_state(row: Row, strategy: jaxdist.Strategy | None) -> Any:
    """Return the state after the call of the row; without a strategy, that of Keras alone."""

    def make() -> Any:
        keeps = Keeps(STATES[row.state], row.aggregation, row.options)
        model = keras.Sequential([keras.Input((FEATURES,)), keeps, layers.Dense(1)])
        more = {"-eagerly": {"run_eagerly": True}, "-two_steps": {"steps_per_execution": 2}}
        model.compile(keras.optimizers.SGD(0.0), "mse", **more.get(row.options, {}))
        return model

    with strategy.scope() if strategy else contextlib.nullcontext():
        model = make()
    data = (X,) if "predict" in row.method else (X, X[:, :1])
    call = getattr(model, row.method)
    if row.method.endswith("on_batch"):
        for n in range(0, ROWS, row.batch):
            call(*(array[n : n + row.batch] for array in data))
    else:
        more = {"shuffle": False} if row.method == "fit" else {}
        call(*data, batch_size=row.batch, verbose=0, **more)
    return np.asarray(model.layers[0].state.value)


@functools.cache
def _train_alone(state: str, batch: int, method: str, options: str) -> Any:
    """Return the state of Keras alone. It has one replica, whatever the aggregation is."""
    return _train(Row(state, "none", 1, batch, method, options), None)


@pytest.mark.parametrize("row", sampled(TABLE, 12))
def test_own_state_is_that_of_keras_alone_or_refused(row: Row) -> None:
    right = STATES[row.state].right
    expected = _train_alone(row.state, row.batch, row.method, row.options)
    rtol = 2e-2 if "bfloat16" in row.options else 1e-5
    # A sum that is rounded to bfloat16 before it is assigned is not only added to.
    is_float = STATES[row.state].dtype == "float32"
    is_rounded = is_float and row.options == "-bfloat16" and row.aggregation == "sum"
    if row.replicas == 1 or right is None or (row.aggregation in right and not is_rounded):
        np.testing.assert_allclose(_train(row, row.replicas), expected, rtol=rtol)
    elif row.aggregation in ("none", "sum") or row.state in ("read_again", "twice"):
        with refused(StateDivergenceError, "kept", "replicas", "add_weight"):
            _train(row, row.replicas)


@pytest.mark.parametrize("which", ["mean", "only_first_replica"])
def test_an_aggregation_takes_the_value_that_it_says(which: str) -> None:
    row = Row("last_total", which, 2, 4)
    last = X[ROWS - 2 :]
    expected = last[:1].sum() if which == "only_first_replica" else last.sum() / 2
    np.testing.assert_allclose(_train(row, 2), expected)


class OwnStep(keras.Sequential):
    """A model with a step of its own."""

    def train_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().train_step(*args, **kwargs)


def test_a_step_of_the_user_may_not_change_state_that_is_summed() -> None:
    with make_strategy(2).scope():
        keeps = Keeps(STATES["rows"], "sum")
        model = OwnStep([keras.Input((FEATURES,)), keeps, layers.Dense(1)])
        model.compile("sgd", "mse")
    with refused(StateDivergenceError, "kept", "aggregation='sum'", "compute_loss"):
        model.fit(X, X[:, :1], batch_size=8, verbose=0)


class AddsInLoss(keras.Sequential):
    """A model whose loss adds to the state of its layer too."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        self.layers[0].state.assign_add(1.0)
        return super().compute_loss(*args, **kwargs)


@pytest.mark.parametrize("method", ["fit", "evaluate"])
@pytest.mark.parametrize("aggregation", ["sum", "mean", "only_first_replica"])
@pytest.mark.parametrize("state", ["steps", "total"])
def test_state_that_call_and_compute_loss_assign_is_that_of_keras_alone_or_refused(
    state: str, aggregation: str, method: str
) -> None:
    def compute(replicas: int) -> float:
        with make_strategy(replicas).scope():
            keeps = Keeps(STATES[state], aggregation)
            model = AddsInLoss([keras.Input((FEATURES,)), keeps, layers.Dense(1)])
            model.compile(keras.optimizers.SGD(0.0), "mse")
        getattr(model, method)(X, X[:, :1], batch_size=8, verbose=0)
        return float(model.layers[0].state.value)

    if state == "steps":
        assert compute(2) == compute(1)
    else:
        with refused(StateDivergenceError, "kept", "compute_loss", "both assign"):
            compute(2)


@pytest.mark.parametrize("state", ["steps", "steps_as_integers", "flag", "decay"])
def test_equal_state_of_predictions_is_kept_where_a_replica_has_no_rows(state: str) -> None:
    row = Row(state, "none", 2, 7, "predict")
    np.testing.assert_allclose(_train(row, 2), _train(row, None))
