"""Layers that name layouts of the strategy's mesh: the numbers of Keras without them."""

import contextlib
from typing import Any

import jax
import keras
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from keras import layers, ops

from tests.keras import split
from tests.keras.models import FEATURES, make_data, make_strategy
from tests.tables import sampled

X = make_data(16).x


class LaysOut(layers.Layer):
    """A layer that names a layout, keeps state, and adds a loss."""

    def __init__(self, layout: Any) -> None:
        super().__init__()
        self.layout = layout

    def build(self, *_: Any) -> None:
        self.rows = self.add_weight(
            shape=(), initializer="zeros", trainable=False, aggregation="sum"
        )

    def call(self, *args: Any, **_: Any) -> Any:
        (x,) = args
        if self.layout is not None:
            x = jax.lax.with_sharding_constraint(x, self.layout)
        if isinstance(x.shape[0], int):
            self.rows.assign_add(1.0 * x.shape[0])
            self.add_loss(ops.mean(x**2))
        return x


ROWS = [f"{s}-{k}-{e}" for s in ("two", "grid") for k in ("sharding", "spec") for e in "01"]


@pytest.mark.parametrize("row", sampled(ROWS, 3))
def test_a_layout_with_replica_axes_in_a_layer_changes_no_number(row: str) -> None:
    which, kind, eagerly = row.split("-")
    strategy = make_strategy(2) if which == "two" else split.make_strategy(2, 2)
    spec = PartitionSpec(*strategy.layout.replica_axes)
    layout = spec if kind == "spec" else NamedSharding(strategy.layout.mesh, spec)
    found = []
    for used in (None, strategy):
        keras.utils.set_random_seed(0)
        with used.scope() if used else contextlib.nullcontext():
            laid_out = LaysOut(layout if used else None)
            model = keras.Sequential([keras.Input((FEATURES,)), laid_out, layers.Dense(1)])
            model.compile("sgd", "mse", run_eagerly=eagerly == "1")
        losses = model.fit(X, X[:, :1], batch_size=8, shuffle=False, verbose=0).history["loss"]
        outputs = model.predict(X, verbose=0)
        found.append((losses, float(laid_out.rows.value), outputs))
    for got, wanted in zip(found[1], found[0], strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
