"""Generators and other sources of batches."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest

from tests.keras.models import FEATURES, make_data, make_strategy


class Sequence(keras.utils.PyDataset):
    """Batches of four rows and a last one of two."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        data = make_data(10)
        rows = slice(4 * index, 4 * index + 4)
        return data.x[rows], data.y[rows]


def _generate() -> Iterator[Any]:
    data = make_data(10)
    # One buffer for all batches, as a reader has it.
    x = np.empty((4, FEATURES), "float32")
    while True:
        for start in (0, 4, 8):
            count = min(4, 10 - start)
            x[:count] = data.x[start : start + count]
            yield x[:count], data.y[start : start + count]


def _generate_once() -> Iterator[Any]:
    yield from itertools.islice(_generate(), 3)


@pytest.mark.parametrize(
    ("source", "steps"), [(Sequence, None), (_generate, 3)], ids=["py_dataset", "generator"]
)
def test_a_source_of_batches_gives_the_numbers_of_keras_alone(
    source: Callable[[], Any], steps: int | None
) -> None:
    found = []
    for strategy in (None, make_strategy(3)):
        keras.utils.set_random_seed(0)
        if strategy is None:
            model = _make_model()
        else:
            with strategy.scope():
                model = _make_model()
        history = model.fit(source(), epochs=2, steps_per_epoch=steps, shuffle=False, verbose=0)
        found.append(history.history["loss"])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_a_generator_that_ends_gives_the_numbers_of_keras_alone() -> None:
    found = []
    for strategy in (None, make_strategy(3)):
        keras.utils.set_random_seed(0)
        with contextlib.nullcontext() if strategy is None else strategy.scope():
            model = _make_model()
        history = model.fit(_generate_once(), shuffle=False, verbose=0)
        losses = [history.history["loss"][0]]
        losses.append(model.evaluate(_generate_once(), verbose=0))
        outputs = model.predict(((x,) for x, _ in _generate_once()), verbose=0)
        found.append(np.concatenate([losses, outputs.ravel()]))
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)


def _make_model() -> Any:
    model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(3, "softmax")])
    model.compile("sgd", "sparse_categorical_crossentropy")
    return model
