"""Integers of 64 bits in the data of `fit.Model`: those that do not fit are a named error."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxdist
from jaxdist import fit
from jaxdist.errors import ArgumentError
from tests.tables import sampled

ARRAYS: dict[str, tuple[np.ndarray, bool]] = {
    "fits": (np.arange(8) + 2**31 - 8, True),
    "uint64 that fits": (np.arange(8).astype("uint64") + 2**32 - 8, True),
    "2**40": (np.where(np.arange(8) == 5, 2**40, 1), False),
    "2**32 as uint64": (np.full(8, 2**32, np.uint64), False),
}
STRATEGIES: dict[str, Callable[[], Any]] = {
    "2 replicas": lambda: jaxdist.MirroredStrategy(["cpu:0", "cpu:1"]),
    "1 device": lambda: jaxdist.OneDeviceStrategy("cpu:0"),
    "2 virtual ones": lambda: jaxdist.MirroredStrategy(["cpu:0", "cpu:1"], deterministic=True),
}
X = np.ones(8, "float32")


class _Line(nnx.Module):
    def __init__(self) -> None:
        self.w = nnx.Param(jnp.ones(()))

    def __call__(self, x: Any) -> Any:
        return x.astype("float32") * self.w[...]


CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "fit of x": lambda m, a: m.fit(a, X, batch_size=8, verbose=0),
    "fit of y": lambda m, a: m.fit(X, a, batch_size=8, verbose=0),
    "fit of sample_weight": lambda m, a: m.fit(X, X, sample_weight=a, batch_size=8, verbose=0),
    "fit of validation_data": lambda m, a: m.fit(
        X, X, validation_data=(a, X), batch_size=8, verbose=0
    ),
    "fit of batches": lambda m, a: m.fit([(a, X)], verbose=0),
    "evaluate of x": lambda m, a: m.evaluate(a, X, verbose=0),
    "evaluate of y": lambda m, a: m.evaluate(X, a, verbose=0),
    "predict": lambda m, a: m.predict(a),
    "train_on_batch of x": lambda m, a: m.train_on_batch(a, X),
    "train_on_batch of y": lambda m, a: m.train_on_batch(X, a),
    "test_on_batch of x": lambda m, a: m.test_on_batch(a, X),
    "predict_on_batch": lambda m, a: m.predict_on_batch(a),
}
TABLE = [(c, s, a) for c in CALLS for s in STRATEGIES for a in ARRAYS]


@pytest.mark.parametrize("row", sampled(TABLE, 10, name=", ".join))
def test_data_that_does_not_fit_is_an_error(row: tuple[str, str, str]) -> None:
    call, of, kind = row
    array, fits = ARRAYS[kind]
    with STRATEGIES[of]().scope():
        model = fit.Model(_Line())
    model.compile(optax.sgd(0.0), loss=lambda y, predictions: (predictions - y) ** 2)
    if fits:
        CALLS[call](model, array)
        return
    with pytest.raises(ArgumentError, match=f"{array.dtype} with integers from") as raised:
        CALLS[call](model, array)
    assert "jax_enable_x64" in str(raised.value)


@pytest.mark.parametrize("of", STRATEGIES)
def test_weights_of_classes_are_floats_and_may_be_large(of: str) -> None:
    with STRATEGIES[of]().scope():
        model = fit.Model(_Line())
    model.compile(optax.sgd(0.0), loss=lambda y, predictions: (predictions - y) ** 2)
    weights: Any = {0: np.int64(2**40), 1: 1}
    history = model.fit(X, np.array([0, 1] * 4), class_weight=weights, batch_size=8, verbose=0)
    # Predictions are 1: the loss of class 0 is its weight, and that of class 1 is 0.
    np.testing.assert_allclose(history.history["loss"], [2**40 / 2], rtol=1e-6)
