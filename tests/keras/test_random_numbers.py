"""Random numbers of methods that get the rows of all replicas: those of Keras alone."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np
import pytest
from keras import layers, ops

from tests.keras.models import FEATURES, Data, check_equal, make_data, make_strategy, train
from tests.tables import sampled

SIZE = 21
X = make_data(SIZE).x
# Of no layer, so that each step draws the same numbers.
SEEDS = keras.random.SeedGenerator(9)


def _take(args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """Return `x`, `y` and `y_pred` of a call of `compute_loss`."""
    names = ("x", "y", "y_pred", "sample_weight", "training")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return given["x"], given["y"], given["y_pred"]


class Noisy(keras.Sequential):
    """A model with random numbers in a method that gets the rows of all replicas."""

    def __init__(self, make_layer: Callable[[], Any] = layers.ReLU) -> None:
        super().__init__([keras.Input((FEATURES,)), layers.Dense(2)])
        self.seeds = keras.random.SeedGenerator(3)
        self.other: Any = make_layer()


class AddsNoise(Noisy):
    """Adds noise to the outputs."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        _, y, y_pred = _take(args, kwargs)
        noise = keras.random.normal(ops.shape(y_pred), seed=self.seeds)
        return ops.mean((y - y_pred * (1 + 0.1 * noise)) ** 2)


class MixesRows(Noisy):
    """Mixes each row with another one, with random weights (mixup)."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        x, y, _ = _take(args, kwargs)
        size = ops.shape(x)[0]
        weight = keras.random.uniform((size, 1), seed=self.seeds)
        order = keras.random.shuffle(ops.arange(size), seed=self.seeds)

        def mix(array: Any) -> Any:
            return weight * array + (1 - weight) * ops.take(array, order, axis=0)

        return ops.mean((mix(y) - self(mix(x), training=True)) ** 2)


class Penalizes(Noisy):
    """Adds a penalty for gradients between random points (a Wasserstein GAN)."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        x, y, y_pred = _take(args, kwargs)
        weight = keras.random.uniform((ops.shape(x)[0], 1), seed=self.seeds)
        between = weight * x + (1 - weight) * ops.flip(x, axis=0)
        slopes = jax.grad(lambda given: ops.sum(self(given) ** 2))(between)
        penalty = ops.mean((ops.sqrt(ops.sum(slopes**2, -1) + 1e-6) - 1) ** 2)
        return ops.mean((y - y_pred) ** 2) + penalty


class CallsLayer(Noisy):
    """Calls a layer on the outputs of all rows."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        _, y, y_pred = _take(args, kwargs)
        return ops.mean((y - self.other(y_pred, training=True)) ** 2)


class NoisyMetric(Noisy):
    """Shows the mean of noisy outputs."""

    def compute_metrics(self, *args: Any, **_: Any) -> Any:
        _, _, y_pred, _ = args
        noise = keras.random.normal(ops.shape(y_pred), seed=SEEDS)
        return {"noisy": ops.mean(y_pred * noise), **self.get_metrics_result()}


class NoisySGD(keras.optimizers.SGD):
    """Adds noise to each gradient (Langevin dynamics)."""

    # pyrefly: ignore[bad-override]
    def update_step(self, gradient: Any, variable: Any, rate: Any) -> None:
        noise = keras.random.normal(gradient.shape, seed=7)
        drawn = keras.random.normal(gradient.shape, seed=SEEDS)
        super().update_step(gradient + 0.1 * noise + 0.1 * drawn, variable, rate)


MAKE: dict[str, Callable[[], Any]] = {
    "noise": AddsNoise,
    "mixup": MixesRows,
    "penalty": Penalizes,
    "dropout": lambda: CallsLayer(lambda: layers.Dropout(0.5, seed=2)),
    "gaussian": lambda: CallsLayer(lambda: layers.GaussianNoise(0.3, seed=2)),
    "statistics": lambda: CallsLayer(lambda: layers.BatchNormalization()),
    "synchronized": lambda: CallsLayer(lambda: layers.BatchNormalization(synchronized=True)),
    "metric": NoisyMetric,
    "optimizer": Noisy,
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of the table."""

    name: str
    replicas: int
    batch: int
    eagerly: bool = False

    def __str__(self) -> str:
        return f"{self.name}-{self.replicas}-{self.batch}{'-eagerly' * self.eagerly}"


TABLE = [Row(n, r, b) for n in MAKE for r in (2, 4, 8) for b in (8, 12, 21)]
TABLE += [Row(n, 2, 8, True) for n in MAKE]


@pytest.mark.parametrize("row", sampled(TABLE, 4))
def test_what_gets_all_rows_draws_the_numbers_of_keras_alone(row: Row) -> None:
    def compile_arguments() -> dict[str, Any]:
        kind = NoisySGD if row.name == "optimizer" else keras.optimizers.SGD
        return {"optimizer": kind(0.05), "loss": "mse", "run_eagerly": row.eagerly}

    seeds: list[Any] = []

    def make() -> Any:
        model = MAKE[row.name]()
        seeds.append(model.seeds)
        return model

    data = Data(X, X[:, :2])
    expected = train(None, make, compile_arguments, data, row.batch)
    found = train(make_strategy(row.replicas), make, compile_arguments, data, row.batch)
    check_equal(found, expected, 1e-4)
    alone, own = (np.asarray(g.state.value).tolist() for g in seeds)
    assert own == alone
