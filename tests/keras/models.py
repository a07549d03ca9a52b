"""Keras models, and what they compute with a strategy and without one."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import jaxdist

Compile = dict[str, Any]
CLASSES = 3
FEATURES = 5


@dataclasses.dataclass(frozen=True)
class Data:
    """A data set; each field has one row for each example."""

    x: Any
    y: Any
    weights: Any = None


def make_data(size: int, *, weighted: bool = False, seed: int = 0) -> Data:
    """Return random examples with labels of three classes."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(size, FEATURES)).astype("float32")
    y = random.integers(0, CLASSES, size)
    weights = random.uniform(0.1, 2, size).astype("float32")
    return Data(x, y, weights if weighted else None)


def make_strategy(replicas: int) -> jaxdist.Strategy:
    """Return a strategy on so many virtual devices."""
    if replicas == 1:
        return jaxdist.OneDeviceStrategy("cpu:0")
    return jaxdist.MirroredStrategy([f"cpu:{n}" for n in range(replicas)])


def train(
    strategy: jaxdist.Strategy | None,
    make_model: Callable[[], Any],
    compile_arguments: Callable[[], Compile],
    data: Data,
    batch_size: int,
    **fit_arguments: Any,
) -> dict[str, Any]:
    """Return everything that two epochs, an evaluation and predictions compute."""
    import keras

    keras.utils.set_random_seed(1)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = make_model()
        model.compile(**{"optimizer": keras.optimizers.SGD(0.05), **compile_arguments()})
    history = model.fit(
        data.x,
        data.y,
        batch_size=batch_size,
        epochs=2,
        verbose=0,
        sample_weight=data.weights,
        **fit_arguments,
    )
    scores = model.evaluate(
        data.x,
        data.y,
        batch_size=batch_size,
        verbose=0,
        sample_weight=data.weights,
        return_dict=True,
    )
    return {
        "history": history.history,
        "scores": scores,
        "predictions": model.predict(data.x, batch_size=batch_size, verbose=0),
        "on_batch": model.train_on_batch(data.x, data.y, return_dict=True),
        "test_on_batch": model.test_on_batch(data.x, data.y, return_dict=True),
        "weights": model.get_weights(),
    }


def check_equal(found: Any, expected: Any, rtol: float = 1e-5) -> None:
    """Raise if two results of `train` differ."""
    names = jax.tree_util.tree_leaves_with_path(expected)
    found_names = jax.tree_util.tree_leaves_with_path(found)
    keystr = jax.tree_util.keystr
    missing = {keystr(p) for p, _ in names} ^ {keystr(p) for p, _ in found_names}
    assert missing == set(), missing
    for (path, want), got in zip(names, jax.tree.leaves(found), strict=True):
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(got, want, rtol=rtol, atol=2e-6, err_msg=name)
