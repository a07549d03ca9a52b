"""Losses and metrics of integers, and of numbers that are not classes, are those of NumPy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxdist import fit
from tests.fit.models import mirrored


class _Same(nnx.Module):
    """A module that returns what it gets."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return x


def _none(y_true: Any, y_pred: Any) -> Any:
    return jnp.zeros(y_pred.shape[0])


def _evaluate(x: Any, y: Any, loss: Any = _none, metric: Any = ()) -> dict[str, float]:
    model = fit.Model(_Same(), mirrored(3))
    model.compile("sgd", loss, metrics=metric)
    return model.evaluate(x, y, 4, verbose=0, return_dict=True)


PREDICTED = np.array([5, 0, 100, 7, 1, 90, 0])
TARGETS = np.array([0, 5, 1, 100, 1, 2, 0])
_ERRORS: dict[str, Any] = {
    "mse": lambda d: np.mean(d**2),
    "mae": lambda d: np.mean(abs(d)),
    "root_mean_squared_error": lambda d: np.sqrt(np.mean(d**2)),
}


_PAIRS = [("uint8", "uint8"), ("int8", "bool"), ("bool", "uint32"), ("uint32", "uint32")]


@pytest.mark.parametrize(("of_outputs", "of_targets"), _PAIRS)
def test_differences_of_integers_do_not_wrap_around(of_outputs: str, of_targets: str) -> None:
    x, y = PREDICTED.astype(of_outputs), TARGETS.astype(of_targets)
    found = _evaluate(x[:, None], y, loss="mse", metric=list(_ERRORS))
    differences = x.astype(float) - y.astype(float)
    wanted = {name: error(differences) for name, error in _ERRORS.items()}
    assert found == pytest.approx({"loss": wanted["mse"], **wanted})


def test_targets_are_not_rounded_to_the_dtype_of_the_outputs() -> None:
    x = np.full((6, 1), 256.0, jnp.bfloat16)
    assert _evaluate(x, np.full(6, 257), loss="mae")["loss"] == 1.0  # 257 is no bfloat16.
    assert _evaluate(x.astype("float16"), np.full(6, 70256), loss="mae")["loss"] == 7e4


NOT_CLASSES = [1.7, np.nan, -0.5, np.inf, 2.0**32]


@pytest.mark.parametrize("metric", [fit.Accuracy("found"), fit.TopKAccuracy(1, "found")])
def test_a_number_that_is_not_a_class_is_never_right(metric: Any) -> None:
    x = np.tile(np.eye(2, dtype=np.float32), (3, 1))  # Classes 0 and 1 in turn.
    right = np.array([0, 1] * 3, np.float32)
    assert _evaluate(x, right, metric=[metric])["found"] == 1.0
    for number in NOT_CLASSES:
        y = right.copy()
        y[[0, 3]] = number
        assert _evaluate(x, y, metric=[metric])["found"] == pytest.approx(4 / 6), number


def test_classes_of_unsigned_integers_do_not_wrap_around() -> None:
    x = np.eye(300, dtype=np.float32)[[255, 0, 128, 1]]
    y = np.array([255, 0, 128, 1])
    for dtype in ("uint8", "uint16", "uint32", "int16", "float32"):
        assert _evaluate(x, y.astype(dtype), metric=[fit.Accuracy("found")])["found"] == 1.0
    too_large = np.array([2**32 - 1, 2**31, 128, 1], np.uint32)
    assert _evaluate(x, too_large, metric=[fit.Accuracy("found")])["found"] == 0.5


def test_the_output_nan_is_never_right() -> None:
    x = np.array([[np.nan, 0], [1, 0], [0, np.nan], [np.nan, np.nan]], np.float32)
    y = np.array([0, 0, 1, 0])
    assert _evaluate(x, y, metric=[fit.Accuracy("found")])["found"] == 0.25
    assert _evaluate(x, y, metric=[fit.TopKAccuracy(1, "found")])["found"] == 0.25


def test_nan_is_on_no_side_of_a_threshold() -> None:
    x = np.array([[np.nan], [1], [-1], [-1]], np.float32)
    y = np.array([0, 1, 0, np.nan], np.float32)
    assert _evaluate(x, y, metric=[fit.BinaryAccuracy(0.0, "found")])["found"] == 0.5


def test_a_number_that_is_not_a_class_has_no_weight_of_a_class() -> None:
    y = np.array([0, 0.5, 1, np.nan, -0.5, 0], np.float32)
    model = fit.Model(nnx.Linear(1, 1, rngs=nnx.Rngs(0)), mirrored(3))
    model.compile("sgd", lambda y_true, y_pred: jnp.ones(y_pred.shape[0]) + 0 * y_pred[:, 0])
    history = model.fit(np.ones((6, 1), np.float32), y, 6, class_weight={0: 4.0}, verbose=0)
    assert history.history["loss"] == [pytest.approx((4 + 4 + 4) / 6)]


def test_a_class_of_64_bits_does_not_wrap_around() -> None:
    jax.config.update("jax_enable_x64", True)
    try:
        targets = np.array([-(2**32), 2**32, -1, 1], np.int64)
        logs = _evaluate(np.eye(2, dtype=np.float32)[[0, 0, 1, 1]], targets, metric=["accuracy"])
    finally:
        jax.config.update("jax_enable_x64", False)
    assert logs["accuracy"] == 0.25
