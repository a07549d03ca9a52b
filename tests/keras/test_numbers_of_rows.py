"""fit, evaluate and predict of Keras for every number of rows, also with replicas without any."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

from tests.keras.models import make_strategy
from tests.tables import sampled

STEPS, FEATURES = 4, 3
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(96, STEPS, FEATURES)).astype("float32")
Y = RANDOM.normal(size=(96, 2)).astype("float32")


class Reshapes(layers.Layer):
    """A layer that reshapes with the number of rows."""

    def call(self, *args: Any, **_: Any) -> Any:
        (x,) = args
        return ops.reshape(x, (x.shape[0], -1)) if x.shape[0] else ops.reshape(x, (-1, 12))

    def compute_output_shape(self, *_: Any, **__: Any) -> Any:
        return (None, STEPS * FEATURES)


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of layers; `is_exact` says whether each row is computed apart from the others."""

    make: Callable[[], Sequence[Any]]
    is_exact: bool = True


KINDS = {
    "dense": Kind(lambda: [layers.Flatten(), layers.Dense(4, "relu")]),
    "reshape": Kind(lambda: [Reshapes(), layers.Dense(4)]),
    "gru": Kind(lambda: [layers.GRU(3)]),
    "norm": Kind(
        lambda: [layers.Conv1D(4, 2), layers.BatchNormalization(momentum=0.5), layers.Flatten()],
        is_exact=False,
    ),
    "dropout": Kind(
        lambda: [layers.Flatten(), layers.Dense(8), layers.Dropout(0.5)], is_exact=False
    ),
}
# The last batch has these numbers of rows: few, the replicas' multiples, and those between.
OF_32 = (1, 3, 5, 9, 17, 25, 28, 31, 33, 36, 57, 63)


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of the table."""

    kind: str
    replicas: int
    batch: int
    rows: int

    def __str__(self) -> str:
        return f"{self.kind}-{self.replicas}-{self.batch}-{self.rows}"


SIZES = [(8, rows) for rows in range(1, 25)] + [(32, rows) for rows in OF_32]
TABLE = [Row(k, r, b, n) for k in KINDS for r in (1, 2, 4, 8) for b, n in SIZES]


def _make(row: Row, strategy: Any) -> tuple[Any, Any]:
    keras.utils.set_random_seed(0)
    with strategy.scope():
        given = keras.Input((STEPS, FEATURES))
        model = keras.Sequential([given, *KINDS[row.kind].make(), layers.Dense(2)])
        error = keras.metrics.MeanAbsoluteError(name="mae")
        model.compile(keras.optimizers.SGD(0.05), "mse", metrics=[error])
    return model, error


def _evaluate(model: Any, row: Row) -> tuple[Any, Any]:
    given: dict[str, Any] = {"batch_size": row.batch, "verbose": 0}
    scores = model.evaluate(X[: row.rows], Y[: row.rows], return_dict=True, **given)
    return scores, model.predict(X[: row.rows], **given)


@pytest.mark.parametrize("row", sampled(TABLE, 5))
def test_every_number_of_rows_gives_the_numbers_of_one_device(row: Row) -> None:
    x, y = X[: row.rows], Y[: row.rows]
    one, _ = _make(row, make_strategy(1))
    model, error = _make(row, make_strategy(row.replicas))
    given: dict[str, Any] = {"batch_size": row.batch, "shuffle": False, "verbose": 0}
    history = model.fit(x, y, epochs=2, **given).history
    assert np.isfinite([*history["loss"], *history["mae"]]).all()
    assert all(np.isfinite(w).all() for w in model.get_weights())
    # In the last epoch, every example counted once.
    assert [float(m.count.value) for m in (model.metrics[0], error)] == [row.rows] * 2
    assert int(model.optimizer.iterations.value) == 2 * -(-row.rows // row.batch)
    if KINDS[row.kind].is_exact:
        expected = one.fit(x, y, epochs=2, **given).history
        for name, values in expected.items():
            np.testing.assert_allclose(history[name], values, rtol=2e-5, atol=1e-6)
        for found, wanted in zip(model.get_weights(), one.get_weights(), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=2e-6)
    one.set_weights(model.get_weights())
    (scores, outputs), (wanted, expected) = _evaluate(model, row), _evaluate(one, row)
    for name, value in wanted.items():
        np.testing.assert_allclose(scores[name], value, rtol=2e-5, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(outputs, expected, rtol=1e-4, atol=2e-6)
