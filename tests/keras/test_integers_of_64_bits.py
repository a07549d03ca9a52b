"""Integers of 64 bits in the data of Keras models: those that do not fit are a named error."""

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest

import jaxdist
from jaxdist.errors import ArgumentError
from tests.parameter_server.strategy.making import make_strategy
from tests.tables import sampled

COUNT = 16  # rows
IDS: dict[str, tuple[np.ndarray, bool]] = {
    "fits": (np.arange(COUNT) + 2**31 - COUNT, True),
    "uint64 that fits": (np.arange(COUNT).astype("uint64") + 2**32 - COUNT, True),
    "2**40": (np.where(np.arange(COUNT) == 9, 2**40, 1), False),
    "2**32 as uint64": (np.full(COUNT, 2**32, np.uint64), False),
}
ROWS = np.arange(COUNT)
ONES = np.ones((COUNT, 1), "float32")
STRATEGIES: dict[str, Callable[[], Any]] = {
    "2 replicas": lambda: jaxdist.MirroredStrategy(["cpu:0", "cpu:1"]),
    "1 device": lambda: jaxdist.OneDeviceStrategy("cpu:0"),
    "virtual replicas": lambda: jaxdist.MirroredStrategy(["cpu:0"], deterministic=True),
    "parameter servers": lambda: make_strategy(workers=1),
}


class Batches(keras.utils.PyDataset):
    """One batch."""

    def __init__(self, *arrays: Any) -> None:
        super().__init__()
        self._arrays = arrays

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        return self._arrays if len(self._arrays) > 1 else self._arrays[0]


def _generate(*arrays: Any) -> Iterator[Any]:
    yield arrays


# The names of what is given, and the call with the model and the integers.
CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "fit of x": lambda m, a: m.fit(a, ONES, verbose=0),
    "fit of y": lambda m, a: m.fit(ROWS, a, verbose=0),
    "fit of sample_weight": lambda m, a: m.fit(ROWS, ONES, sample_weight=a, verbose=0),
    "fit of validation_data": lambda m, a: m.fit(ROWS, ONES, validation_data=(a, ONES), verbose=0),
    "fit of a generator": lambda m, a: m.fit(
        _generate(a, ONES), steps_per_epoch=1, shuffle=False, verbose=0
    ),
    "fit of a PyDataset": lambda m, a: m.fit(Batches(a, ONES), verbose=0),
    "fit in two batches": lambda m, a: m.fit(a, ONES, batch_size=8, shuffle=False, verbose=0),
    "evaluate of x": lambda m, a: m.evaluate(a, ONES, verbose=0),
    "evaluate of y": lambda m, a: m.evaluate(ROWS, a, verbose=0),
    "evaluate of a PyDataset": lambda m, a: m.evaluate(Batches(a, ONES), verbose=0),
    "predict": lambda m, a: m.predict(a, verbose=0),
    "predict of a PyDataset": lambda m, a: m.predict(Batches(a), verbose=0),
    "train_on_batch of x": lambda m, a: m.train_on_batch(a, ONES),
    "train_on_batch of y": lambda m, a: m.train_on_batch(ROWS, a),
    "train_on_batch of y, by name": lambda m, a: m.train_on_batch(x=ROWS, y=a),
    "train_on_batch of sample_weight": lambda m, a: m.train_on_batch(ROWS, ONES, a),
    "test_on_batch of x": lambda m, a: m.test_on_batch(a, ONES),
    "test_on_batch of y": lambda m, a: m.test_on_batch(ROWS, a),
    "predict_on_batch": lambda m, a: m.predict_on_batch(a),
}
TABLE = [(c, s, i) for c in CALLS for s in STRATEGIES for i in IDS]


def _make_model(strategy: Any) -> Any:
    keras.utils.set_random_seed(0)
    with strategy.scope():
        inputs = keras.Input((), dtype="int64")
        as_floats = keras.ops.reshape(keras.ops.cast(inputs, "float32"), (-1, 1)) / float(2**31)
        model = keras.Model(inputs, keras.layers.Dense(1, kernel_initializer="ones")(as_floats))
        model.compile(keras.optimizers.SGD(1e-30), "mse")
    return model


@pytest.mark.filterwarnings("ignore:The structure of `inputs`")
@pytest.mark.parametrize("row", sampled(TABLE, 16, name=", ".join))
def test_data_that_does_not_fit_is_an_error_that_names_it(row: tuple[str, str, str]) -> None:
    call, of, kind = row
    ids, fits = IDS[kind]
    model = _make_model(STRATEGIES[of]())
    if fits:
        CALLS[call](model, ids)
        return
    before = [np.asarray(w) for w in model.get_weights()]
    with pytest.raises(ArgumentError, match=f"{ids.dtype} with integers from") as raised:
        CALLS[call](model, ids)
    assert "jax_enable_x64" in str(raised.value)
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_allclose(old, new, atol=1e-20)  # a batch before may have trained


@pytest.mark.parametrize("of", STRATEGIES)
def test_integers_that_fit_keep_their_values(of: str) -> None:
    model = _make_model(STRATEGIES[of]())
    ids = np.tile([3, 2**31 - 1, -(2**31), 5], COUNT // 4)
    wanted = (ids / 2**31)[:, None]
    np.testing.assert_allclose(model.predict(ids, verbose=0), wanted, rtol=1e-6)
    np.testing.assert_allclose(model.predict_on_batch(ids), wanted, rtol=1e-6)
