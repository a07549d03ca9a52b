"""Metrics are those of NumPy over all examples, however they are split."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from jaxdist import fit
from jaxdist.errors import ArgumentError, ShapeError
from tests.fit.models import make_data, make_model, mirrored

COUNT = 23


class _Same(nnx.Module):
    """A module that returns what it gets."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return x


class _Largest(fit.Metric):
    """A metric of its own: how often each class is predicted."""

    def sums(self, y_true: Any, y_pred: Any, weight: jax.Array) -> dict[str, jax.Array]:
        chosen = jax.nn.one_hot(jnp.argmax(y_pred, -1), y_pred.shape[-1])
        return {"counts": (chosen * weight[:, None]).sum(0)}

    def result(self, sums: Any) -> float:
        return float(sums["counts"].max() / sums["counts"].sum())


def _evaluate(metric: Any, x: np.ndarray, y: np.ndarray, weight: np.ndarray, size: int) -> float:
    loss = lambda y_true, y_pred: jnp.zeros(y_pred.shape[0])  # noqa: E731
    model = fit.Model(_Same(), mirrored(3))
    model.compile("sgd", loss, weighted_metrics=[metric])
    return model.evaluate(x, y, size, sample_weight=weight, verbose=0)[1]


def _wanted(x: np.ndarray, y: np.ndarray, weight: np.ndarray) -> dict[str, float]:
    says, is_so = x[:, 0] > 0, y > 0.5
    right = np.sum(weight * (says & is_so))
    square = (x[:, 0] - y) ** 2
    return {
        "precision": right / np.sum(weight * says),
        "recall": right / np.sum(weight * is_so),
        "binary_accuracy": np.average(says == is_so, weights=weight),
        "root_mean_squared_error": np.sqrt(np.average(square, weights=weight)),
    }


@pytest.mark.parametrize("size", [1, 7, 32])
def test_metrics_of_one_output_are_those_of_numpy(size: int) -> None:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(COUNT, 1)).astype(np.float32)
    y = rng.integers(0, 2, COUNT).astype(np.float32)
    weight = rng.uniform(size=COUNT).astype(np.float32)
    for metric in (
        fit.Precision(0.0),
        fit.Recall(0.0),
        fit.BinaryAccuracy(0.0),
        fit.RootMeanSquaredError(),
    ):
        found = _evaluate(metric, x, y[:, None], weight, size)
        assert found == pytest.approx(_wanted(x, y, weight)[metric.name], rel=1e-5), metric.name


@pytest.mark.parametrize("size", [1, 7, 32])
def test_metrics_of_classes_are_those_of_numpy(size: int) -> None:
    rng = np.random.default_rng(2)
    x = rng.normal(size=(COUNT, 5)).astype(np.float32)
    y = rng.integers(0, 5, COUNT).astype(np.int32)
    weight = rng.uniform(size=COUNT).astype(np.float32)
    order = np.argsort(-x, axis=1)
    in_two = (order[:, :2] == y[:, None]).any(1)
    counts = np.bincount(x.argmax(1), weights=weight, minlength=5)
    for metric, wanted in (
        ("accuracy", np.average(x.argmax(1) == y, weights=weight)),
        (fit.TopKAccuracy(2), np.average(in_two, weights=weight)),
        (_Largest("largest"), counts.max() / counts.sum()),
        (
            fit.Mean(lambda y_true, y_pred: y_pred[:, 0], "first"),
            np.average(x[:, 0], weights=weight),
        ),
    ):
        assert _evaluate(metric, x, y, weight, size) == pytest.approx(wanted, rel=1e-5)
    one_hot = np.eye(5, dtype=np.float32)[y]
    wanted = np.average(x.argmax(1) == y, weights=weight)
    assert _evaluate("accuracy", x, one_hot, weight, size) == pytest.approx(wanted, rel=1e-5)
    assert _evaluate("accuracy", x, y[:, None], weight, size) == pytest.approx(wanted, rel=1e-5)


def test_accuracy_of_one_output_is_an_error_that_says_what_to_take() -> None:
    x = np.zeros((4, 1), np.float32)
    with pytest.raises(ShapeError, match=r"fit\.BinaryAccuracy\(0\.0\) for logits"):
        _evaluate("accuracy", x, x, np.ones(4, np.float32), 4)
    with pytest.raises(ShapeError, match=r"Pass targets of shape \[2\]"):
        _evaluate(
            "accuracy", np.zeros((6, 3), np.float32), np.zeros((6, 2, 2)), np.ones(6, np.float32), 6
        )


def test_without_positive_outputs_precision_is_zero() -> None:
    x, y = -np.ones((4, 1), np.float32), np.ones((4, 1), np.float32)
    assert _evaluate(fit.Precision(0.0), x, y, np.ones(4, np.float32), 4) == 0.0
    assert _evaluate(fit.Recall(0.0), x, 0 * y, np.ones(4, np.float32), 4) == 0.0


@given(weights=st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]), min_size=11, max_size=11))
def test_an_example_of_weight_zero_counts_nowhere(weights: list[float]) -> None:
    weight = np.asarray(weights, np.float32)
    rng = np.random.default_rng(3)
    x = rng.normal(size=(11, 1)).astype(np.float32)
    # Not finite where the weight is 0: it must not reach any sum.
    x[weight == 0] = np.nan
    values = _SHARED.evaluate(x, np.zeros((11, 1)), 4, sample_weight=weight, verbose=0)
    total = np.sum(weight[weight > 0] * x[weight > 0, 0] ** 2)
    assert values[0] == pytest.approx(total / 11, rel=1e-5, abs=1e-7)
    if weight.sum() > 0:
        assert values[1] == pytest.approx(total / weight.sum(), rel=1e-5)


def _make_shared() -> fit.Model:
    model = fit.Model(_Same(), mirrored(3))
    model.compile("sgd", "mse", weighted_metrics=["mse"])
    return model


_SHARED = _make_shared()


def test_the_loss_is_the_first_of_the_results_and_metrics_follow_in_their_order() -> None:
    data = make_data(9)
    model = make_model(mirrored(2), metrics=["accuracy", fit.TopKAccuracy(2)])
    logs = model.evaluate(data.x, data.y, return_dict=True, verbose=0)
    assert list(logs) == ["loss", "accuracy", "top_2_accuracy"]
    assert model.evaluate(data.x, data.y, verbose=0) == list(logs.values())
    plain = make_model(mirrored(2))
    assert isinstance(plain.evaluate(data.x, data.y, verbose=0), float)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("acuracy", "The nearest: 'accuracy'"),
        ("precison", "The nearest: fit.Precision()"),
        ("sparse_categorical_accuracy", "The nearest: 'accuracy'"),
        ("rmse", "The nearest: 'root_mean_squared_error'"),
        ("xyz", "given metrics[0]='xyz'.\n"),
    ],
)
def test_an_unknown_metric_is_refused_with_the_nearest_names(name: str, near: str) -> None:
    with pytest.raises(ArgumentError) as raised:
        make_model(mirrored(1), metrics=[name])
    assert near in str(raised.value)
