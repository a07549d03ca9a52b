"""Models and examples of the tests of `fit`."""

import dataclasses
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

import jaxdist
from jaxdist import fit

LOSS = optax.softmax_cross_entropy_with_integer_labels
FEATURES, HIDDEN, CLASSES = 4, 8, 3


class Net(nnx.Module):
    """Two dense layers."""

    def __init__(self, seed: int = 0) -> None:
        rngs = nnx.Rngs(seed)
        self.hidden = nnx.Linear(FEATURES, HIDDEN, rngs=rngs)
        self.out = nnx.Linear(HIDDEN, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(nnx.relu(self.hidden(x)))


@dataclasses.dataclass(frozen=True)
class Data:
    """Examples, and a weight for each."""

    x: np.ndarray
    y: np.ndarray
    weight: np.ndarray


def make_data(count: int, seed: int = 0) -> Data:
    """Return examples whose class depends on their features."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, FEATURES)).astype(np.float32)
    y = (x @ rng.normal(size=(FEATURES, CLASSES))).argmax(axis=1).astype(np.int32)
    return Data(x, y, rng.uniform(size=count).astype(np.float32))


def mirrored(count: int) -> jaxdist.Strategy:
    """Return a strategy of `count` replicas."""
    return jaxdist.MirroredStrategy([f"cpu:{i}" for i in range(count)])


def make_model(
    strategy: jaxdist.Strategy, module: nnx.Module | None = None, **compile_args: Any
) -> fit.Model:
    """Return a compiled model, trained by SGD on a classification unless told otherwise."""
    given: dict[str, Any] = {"optimizer": optax.sgd(0.1), "loss": LOSS, **compile_args}
    with strategy.scope():
        model = fit.Model(Net() if module is None else module)
        model.compile(**given)
    return model
