"""State of own layers under a step of the user: the value of Keras alone, or a named error."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np
import pytest
from keras import layers, ops

import jaxdist
from jaxdist.errors import StateDivergenceError
from tests.keras.models import make_strategy
from tests.strategies.oracle import refused
from tests.tables import sampled

ROWS, FEATURES = 22, 3
X = np.random.default_rng(0).integers(-4, 9, (ROWS, FEATURES)).astype("float32")


def _add_up(value: Any) -> Any:
    return jaxdist.get_replica_context().all_reduce("sum", value)


def _gather(x: Any) -> Any:
    return jaxdist.get_replica_context().all_gather(x, axis=0)


@dataclasses.dataclass(frozen=True)
class State:
    """A kind of state.

    Args:
        compute: Returns the new value, given the old one and the rows.
        why: What an error says; empty where the value is that of Keras alone.
    """

    compute: Callable[[Any, Any], Any]
    why: str = ""


COUNTS = "from the number of rows of one replica"
TRACED = "cannot be traced for"
STATES = {
    "steps": State(lambda v, x: v + 1),
    "decay": State(lambda v, x: 0.9 * v + 0.5),
    "rows_of_all": State(lambda v, x: v + _add_up(float(x.shape[0]))),
    "ones_of_all": State(lambda v, x: v + _add_up(ops.sum(ops.ones_like(x)))),
    "total_of_all": State(lambda v, x: v + _add_up(ops.sum(x))),
    "mean_of_all": State(lambda v, x: _add_up(ops.sum(x)) / _add_up(1.0 * x.shape[0])),
    "gathered": State(lambda v, x: v + ops.sum(_gather(x))),
    "gathered_squares": State(lambda v, x: v + ops.sum(ops.reshape(_gather(x) ** 2, (-1,)))),
    "first_of_all": State(lambda v, x: v + ops.relu(_gather(x))[0, 0]),
    "rows": State(lambda v, x: v + float(x.shape[0]), COUNTS),
    "dynamic_rows": State(lambda v, x: v + ops.cast(ops.shape(x)[0], "float32"), COUNTS),
    "ones": State(lambda v, x: v + ops.sum(ops.ones_like(x)), COUNTS),
    "numbers": State(lambda v, x: v + ops.max(ops.arange(x.shape[0])), COUNTS),
    "scaled": State(lambda v, x: v + 0.1 * _add_up(ops.sum(x)) * x.shape[0], COUNTS),
    "in_a_loop": State(
        lambda v, x: ops.fori_loop(0, 2, lambda _, s: s + 1.0 * x.shape[0], v), COUNTS
    ),
    "branch": State(
        lambda v, x: ops.cond(v > 1e6, lambda: v, lambda: v + 1.0 * x.shape[0]), COUNTS
    ),
    "fixed_rows": State(lambda v, x: v + 0 * ops.reshape(x, (-1, 4, FEATURES))[0, 0, 0], TRACED),
}


class Keeps(layers.Layer):
    """A layer with a state that every call changes."""

    def __init__(self, state: State, dtype: str) -> None:
        super().__init__()
        self.kind, self.of_state = state, dtype

    def build(self, *_: Any) -> None:
        self.state = self.add_weight(
            shape=(), initializer="zeros", trainable=False, dtype=self.of_state, name="kept"
        )

    def call(self, *args: Any, **_: Any) -> Any:
        (x,) = args
        # Keras looks for the shapes with a number of rows that is unknown.
        if isinstance(x.shape[0], int):
            new = self.kind.compute(self.state.value, x)
            self.state.assign(ops.cast(new, self.of_state))
        return x


class Own(keras.Sequential):
    """A model with steps of its own."""

    def train_step(self, *args: Any, **_: Any) -> Any:
        (trainable, fixed, of_optimizer, of_metrics), (x, y) = args
        total = _add_up(1.0 * x.shape[0])

        def compute(trainable: Any) -> Any:
            y_pred, new = self.stateless_call(trainable, fixed, x)
            return ops.sum((y_pred - y) ** 2) / total, new

        (loss, fixed), gradients = jax.value_and_grad(compute, has_aux=True)(trainable)
        gradients, loss = _add_up((gradients, loss))
        trainable, of_optimizer = self.optimizer.stateless_apply(of_optimizer, gradients, trainable)
        return {"loss": loss}, (trainable, fixed, of_optimizer, of_metrics)

    def test_step(self, *args: Any, **_: Any) -> Any:
        (trainable, fixed, of_metrics), (x, y) = args
        y_pred, fixed = self.stateless_call(trainable, fixed, x)
        loss = _add_up(ops.sum((y_pred - y) ** 2))
        return {"loss": loss}, (trainable, fixed, of_metrics)

    def predict_step(self, *args: Any, **_: Any) -> Any:
        (trainable, fixed), data = args
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        return self.stateless_call(trainable, fixed, x)


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of the table."""

    state: str
    method: str
    replicas: int
    batch: int
    options: str = ""
    dtype: str = "float32"

    def __str__(self) -> str:
        rest = f"{self.replicas}-{self.batch}{self.options}-{self.dtype}"
        return f"{self.state}-{self.method}-{rest}"


# These compute floats.
FLOATS = ("decay", "in_a_loop", "branch")
METHODS = ("fit", "evaluate", "predict")
TABLE = [Row(s, m, r, b) for s in STATES for m in METHODS for r in (2, 4) for b in (8, 12)]
TABLE += [Row(s, "fit", 2, 7) for s in STATES]
TABLE += [Row(s, "fit", 2, 8, o) for s in STATES for o in ("-eagerly", "-two_steps")]
TABLE += [Row(s, "fit", 2, 8, dtype="int32") for s in STATES if s not in FLOATS]
# Its layer computes for 4 rows of a replica.
TABLE = [r for r in TABLE if r.state != "fixed_rows" or (r.replicas, r.batch) == (2, 8)]


def _compute(row: Row, replicas: int | None) -> float:
    def make() -> Any:
        keeps = Keeps(STATES[row.state], row.dtype)
        model = Own([keras.Input((FEATURES,)), keeps, layers.Dense(1)])
        more = {"-eagerly": {"run_eagerly": True}, "-two_steps": {"steps_per_execution": 2}}
        model.compile(keras.optimizers.SGD(0.01), "mse", **more.get(row.options, {}))
        return model

    if replicas is None:
        model = make()
    else:
        with make_strategy(replicas).scope():
            model = make()
    size = ROWS - ROWS % row.batch if row.state == "fixed_rows" else ROWS
    data = (X[:size],) if row.method == "predict" else (X[:size], X[:size, :1])
    more = {"shuffle": False} if row.method == "fit" else {}
    getattr(model, row.method)(*data, batch_size=row.batch, verbose=0, **more)
    return float(model.layers[0].state.value)


@pytest.mark.parametrize("row", sampled(TABLE, 10))
def test_state_of_a_written_step_is_that_of_keras_alone_or_refused(row: Row) -> None:
    why = STATES[row.state].why
    if why:
        with refused(StateDivergenceError, "kept", why, "compute_loss"):
            _compute(row, row.replicas)
    else:
        expected = _compute(row, None)
        np.testing.assert_allclose(_compute(row, row.replicas), expected, rtol=1e-5)


@pytest.mark.parametrize("state", ["rows", "fixed_rows"])
def test_state_of_one_replica_is_refused_by_its_path(state: str) -> None:
    with refused(StateDivergenceError, "kept", STATES[state].why, "compute_loss"):
        _compute(Row(state, "fit", 2, 8), 2)


class Counts(Own):
    """A model whose steps update a metric."""

    def __init__(self, metric: Any, update: Callable[[Any, Any], Any], *args: Any) -> None:
        super().__init__(*args)
        self.counted, self.update = metric, update

    @property
    def metrics(self) -> list[Any]:
        return [self.counted]

    def train_step(self, *args: Any, **kwargs: Any) -> Any:
        (_, _, _, of_metrics), (x, _) = args
        _, (trainable, fixed, of_optimizer, _) = super().train_step(*args, **kwargs)
        pairs = list(zip(self.counted.variables, of_metrics, strict=True))
        with keras.StatelessScope(state_mapping=pairs) as scope:
            self.update(self.counted, x)
            logs = {"counted": self.counted.result()}
        new = [scope.get_current_value(v) for v in self.counted.variables]
        return logs, (trainable, fixed, of_optimizer, new)


# A metric, how a step updates it, and whether its value is that of Keras alone.
METRICS: dict[str, tuple[Callable[[], Any], Callable[[Any, Any], Any], bool]] = {
    "rows": (keras.metrics.Sum, lambda m, x: m.update_state(1.0 * x.shape[0]), False),
    "ones": (keras.metrics.Sum, lambda m, x: m.update_state(ops.ones(x.shape[0])), False),
    "mean_of_rows": (keras.metrics.Mean, lambda m, x: m.update_state(1.0 * x.shape[0]), False),
    "all_rows": (keras.metrics.Sum, lambda m, x: m.update_state(_add_up(1.0 * x.shape[0])), True),
    "total": (keras.metrics.Sum, lambda m, x: m.update_state(_add_up(ops.sum(x))), True),
    "gathered": (keras.metrics.Sum, lambda m, x: m.update_state(_gather(x)), True),
    "mean_of_gathered": (keras.metrics.Mean, lambda m, x: m.update_state(_gather(x)), True),
    "weighted": (
        keras.metrics.Mean,
        lambda m, x: m.update_state(_add_up(ops.sum(x)), sample_weight=1.0 * x.shape[0]),
        True,
    ),
    "steps": (keras.metrics.Sum, lambda m, x: m.update_state(1.0), True),
}


BY_RIGHT = {
    right: [n + o for n, row in METRICS.items() if row[2] is right for o in ("", "-eagerly")]
    for right in (False, True)
}


@pytest.mark.parametrize("row", [*sampled(BY_RIGHT[False], 2), *sampled(BY_RIGHT[True], 4)])
def test_a_metric_of_a_written_step_is_that_of_keras_alone_or_refused(row: str) -> None:
    name, _, options = row.partition("-")
    make_metric, update, is_right = METRICS[name]

    def compute(replicas: int | None) -> Any:
        with make_strategy(replicas).scope() if replicas else contextlib.nullcontext():
            given = [keras.Input((FEATURES,)), layers.Dense(1)]
            model = Counts(make_metric(), update, given)
            model.compile(keras.optimizers.SGD(0.01), "mse", run_eagerly=bool(options))
        history = model.fit(X[:16], X[:16, :1], batch_size=8, shuffle=False, verbose=0).history
        return history["counted"]

    if is_right:
        np.testing.assert_allclose(compute(2), compute(None), rtol=1e-5)
    else:
        with refused(StateDivergenceError, "sum/total" if "mean" not in name else "mean/total"):
            compute(2)
