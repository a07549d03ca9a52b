"""Integers of 64 bits in the data of an estimator: those that do not fit are a named error."""

import pathlib
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxdist
from jaxdist import estimator as est
from jaxdist.errors import ArgumentError
from tests.tables import sampled

ARRAYS: dict[str, tuple[np.ndarray, bool]] = {
    "fits": (np.array([3, 2**31 - 1, 0, 5]), True),
    "2**40": (np.array([3, 2**40, 0, 5]), False),
    "2**32 as uint64": (np.array([3, 2**32, 0, 5], np.uint64), False),
}
STRATEGIES: dict[str, Callable[[], Any]] = {
    "no strategy": lambda: None,
    "2 replicas": lambda: jaxdist.MirroredStrategy(["cpu:0", "cpu:1"]),
}
X = np.ones(4, "float32")


def _model_fn(features: Any, labels: Any, mode: str) -> est.EstimatorSpec:
    model = est.get_module(lambda rngs: nnx.Linear(1, 1, rngs=rngs))
    predictions = model(features["x"].astype("float32")[:, None] / float(2**31))[:, 0]
    if mode == est.ModeKeys.PREDICT:
        found = {"y": predictions, "ids": features["x"]}
        return est.EstimatorSpec(mode, predictions=found)
    errors = (predictions - labels) ** 2
    return est.EstimatorSpec(
        mode,
        loss=jnp.mean(errors),
        train_op=optax.sgd(1e-30),
        eval_metric_ops={"error": errors},
    )


def _train(e: est.Estimator, features: Any, labels: Any, steps: int = 1) -> None:
    e.train(lambda: [({"x": features}, labels)] * 4, steps=steps)


def _evaluate(e: est.Estimator, features: Any, labels: Any) -> None:
    _train(e, X, X)
    e.evaluate(lambda: [({"x": features}, labels)])


def _predict(e: est.Estimator, features: Any) -> None:
    _train(e, X, X)
    found = [p["ids"] for p in e.predict(lambda: [{"x": features}])]
    np.testing.assert_array_equal(found, features)


CALLS: dict[str, Callable[[est.Estimator, Any], None]] = {
    "train of features": lambda e, a: _train(e, a, X),
    "train of labels": lambda e, a: _train(e, X, a),
    "evaluate of features": lambda e, a: _evaluate(e, a, X),
    "evaluate of labels": lambda e, a: _evaluate(e, X, a),
    "predict": _predict,
}
TABLE = [(c, s, a) for c in CALLS for s in STRATEGIES for a in ARRAYS]


@pytest.mark.parametrize("row", sampled(TABLE, 6, name=", ".join))
def test_data_that_does_not_fit_is_an_error(
    row: tuple[str, str, str], tmp_path: pathlib.Path
) -> None:
    call, of, kind = row
    array, fits = ARRAYS[kind]
    strategy = STRATEGIES[of]()
    config = est.RunConfig(train_distribute=strategy, eval_distribute=strategy)
    estimator = est.Estimator(_model_fn, str(tmp_path), config)
    if fits:
        CALLS[call](estimator, array)
        return
    with pytest.raises(ArgumentError, match=f"{array.dtype} with integers from") as raised:
        CALLS[call](estimator, array)
    assert "jax_enable_x64" in str(raised.value)


def test_a_constant_of_the_model_function_is_an_error(tmp_path: pathlib.Path) -> None:
    ids, _ = ARRAYS["2**40"]

    def model_fn(features: Any, labels: Any, mode: str) -> est.EstimatorSpec:
        return _model_fn({"x": features["x"] + ids}, labels, mode)

    with pytest.raises(ArgumentError, match="int64 with integers from 0 to 1099511627776"):
        _train(est.Estimator(model_fn, str(tmp_path)), X, X)
