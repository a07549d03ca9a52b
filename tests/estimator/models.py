"""A linear model, its data, and what NumPy makes of both."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxdist import estimator as est

RATE = 0.1
_RNG = np.random.default_rng(0)
X = _RNG.normal(size=(40, 3)).astype(np.float32)
Y = (X @ np.array([1.0, -2.0, 0.5], np.float32)).astype(np.float32)


class Line(nnx.Module):
    """A linear model that begins with zeros."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        del rngs
        self.weights = nnx.Param(jnp.zeros(3))

    def __call__(self, features: Any) -> Any:
        """Return one prediction for each row."""
        return features @ self.weights[...]


def model_fn(features: Any, labels: Any, mode: str) -> est.EstimatorSpec:
    """Return the loss of the batch as one number."""
    model = est.get_module(lambda rngs: Line(rngs))
    predictions = model(features)
    if mode == est.ModeKeys.PREDICT:
        return est.EstimatorSpec(mode, predictions={"y": predictions, "twice": 2 * predictions})
    errors = (predictions - labels) ** 2
    return est.EstimatorSpec(
        mode,
        loss=jnp.mean(errors),
        train_op=optax.sgd(RATE),
        eval_metric_ops={
            "error": jnp.abs(predictions - labels),
            "first": (errors, features[:, 0] > 0),
        },
    )


def batches(size: int, rows: int = len(X)) -> Callable[[], list[tuple[Any, Any]]]:
    """Return an input function with batches of a size, the last one perhaps smaller."""
    return lambda: [
        (X[n : min(n + size, rows)], Y[n : min(n + size, rows)]) for n in range(0, rows, size)
    ]


def descend(groups: Sequence[tuple[Any, Any]], weights: Any = None) -> np.ndarray:
    """Return the weights after a step of gradient descent on each batch, in float64."""
    w = np.zeros(3) if weights is None else np.asarray(weights, np.float64)
    for x, y in groups:
        x = x.astype(np.float64)
        w = w - RATE * 2 * x.T @ (x @ w - y) / len(x)
    return w


def read_weights(estimator: est.Estimator) -> np.ndarray:
    """Return the weights of the newest checkpoint."""
    return np.asarray(estimator.get_variable_value("modules.model.weights"))


class Record(est.SessionRunHook):
    """Records which methods are called, and fails in one of them."""

    def __init__(self, fails: str = "", at: int = 1) -> None:
        self.calls: list[str] = []
        self.losses: list[float] = []
        self._fails, self._at = fails, at

    def _note(self, name: str) -> None:
        self.calls.append(name)
        if name == self._fails and self.calls.count(name) == self._at:
            raise ValueError("the hook failed")

    def begin(self) -> None:
        """Record."""
        self._note("begin")

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Record."""
        self._note("after_create_session")

    def before_run(self, run_context: Any) -> None:
        """Record."""
        self._note("before_run")

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Record, with the loss of a training."""
        self._note("after_run")
        if "loss" in run_values.results:
            self.losses.append(float(run_values.results["loss"]))

    def end(self, session: Any) -> None:
        """Record."""
        self._note("end")
