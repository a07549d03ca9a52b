"""Losses and metrics of Keras on replicas: those that add up, and those of all rows together."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

from tests.keras.models import FEATURES, Data, check_equal, make_strategy, train
from tests.tables import sampled

SIZE, BATCH, WORDS = 11, 9, 4
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(SIZE, FEATURES)).astype("float32")
LABELS = RANDOM.integers(0, 3, SIZE)
VALUES = RANDOM.normal(size=(SIZE, 3)).astype("float32")
TOKENS = RANDOM.integers(0, 5, (SIZE, WORDS))
WEIGHTS = RANDOM.uniform(0.1, 2, SIZE).astype("float32")
BINARY = Data(X, (LABELS > 0).astype("float32")[:, None], WEIGHTS)
REGRESSION = Data(X, VALUES)
SENTENCES = Data(TOKENS, TOKENS[:, ::-1].copy(), np.tile(WEIGHTS[:, None], (1, WORDS)))


def _stack(*make: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: keras.Sequential([keras.Input((FEATURES,)), *[layer() for layer in make]])


def _dense(units: int = 3, **kwargs: Any) -> Callable[[], Any]:
    return lambda: layers.Dense(units, **kwargs)


def _compare_rows(y_true: Any, y_pred: Any) -> Any:
    """A loss whose value for a row depends on all rows."""
    centre = ops.mean(y_pred, axis=0, keepdims=True)
    return ops.square(centre - y_pred) + ops.square(y_pred - y_true)


class Spread(keras.metrics.Metric):
    """A metric that does not add up."""

    def __init__(self, name: str = "spread", **kwargs: Any) -> None:
        super().__init__(name=name, **kwargs)
        self.most = self.add_variable((), "zeros", name="most")

    def update_state(self, *args: Any, **_: Any) -> None:
        y_pred = args[1]
        spread = ops.max(y_pred) - ops.min(y_pred)
        self.most.assign(ops.maximum(self.most.value, spread))

    def result(self) -> Any:
        return self.most.value


@keras.saving.register_keras_serializable("tests")
class Adds(layers.Layer):
    """A layer that adds a loss."""

    def __init__(self, compute: Callable[[Any], Any]) -> None:
        super().__init__()
        self.compute = compute

    def call(self, *args: Any, **_: Any) -> Any:
        (x,) = args
        self.add_loss(self.compute(x))
        return x


class OwnLoss(keras.Model):
    """A model that computes its loss from inputs, outputs and weights."""

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        of_rows = ops.mean(ops.abs(y - y_pred)) + ops.mean(x) ** 2
        return of_rows + ops.sum(ops.square(self.layers[-1].kernel))


def _make_own_loss() -> Any:
    given = keras.Input((FEATURES,))
    return OwnLoss(given, layers.Dense(3)(layers.Dense(4)(given)))


def _make_two_outputs() -> Any:
    a, b = keras.Input((FEATURES,), name="a"), keras.Input((FEATURES,), name="b")
    hidden = layers.Dense(4, activation="tanh")(layers.Concatenate()([a, b]))
    outputs = {
        "value": layers.Dense(3, name="value")(hidden),
        "label": layers.Dense(3, activation="softmax", name="label")(hidden),
    }
    return keras.Model({"a": a, "b": b}, outputs)


def _make_tagger() -> Any:
    return keras.Sequential(
        [
            keras.Input((WORDS,), dtype="int32"),
            layers.Embedding(5, 6, mask_zero=True),
            layers.LSTM(5, return_sequences=True),
            layers.Dense(5),
        ]
    )


def _compile_tagger(reduction: str) -> Callable[[], Any]:
    return lambda: {
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction),
        "metrics": ["accuracy"],
        "weighted_metrics": ["accuracy"],
    }


def _compile_two(loss: Any) -> Callable[[], Any]:
    return lambda: {
        "loss": {"value": loss, "label": "sparse_categorical_crossentropy"},
        "loss_weights": {"value": 0.3, "label": 2.0},
        "metrics": {"value": ["mae"], "label": ["accuracy"]},
    }


def _mse(**more: Any) -> Callable[[], Any]:
    return lambda: {"loss": "mse", **{k: v() for k, v in more.items()}}


TWO = Data({"a": X, "b": X[::-1].copy()}, {"value": VALUES, "label": LABELS})
CASES: dict[str, tuple[Callable[[], Any], Callable[[], Any], Data]] = {
    "counts_with_thresholds": (
        _stack(_dense(1, activation="sigmoid")),
        lambda: {
            "loss": "binary_crossentropy",
            "metrics": [
                "AUC",
                "Precision",
                "Recall",
                keras.metrics.BinaryIoU(name="iou"),
                "accuracy",
            ],
            "weighted_metrics": [keras.metrics.AUC(name="weighted_auc")],
        },
        BINARY,
    ),
    "sums_of_squares": (
        _stack(_dense()),
        _mse(
            metrics=lambda: [
                keras.metrics.R2Score(),
                keras.metrics.RootMeanSquaredError(),
                "mae",
                "cosine_similarity",
            ]
        ),
        REGRESSION,
    ),
    "dice_of_all_rows": (
        _stack(_dense(activation="sigmoid")),
        lambda: {"loss": keras.losses.Dice(), "metrics": ["mse"]},
        Data(X, abs(VALUES)),
    ),
    "loss_of_all_rows": (
        _stack(_dense(4, kernel_regularizer="l2", activity_regularizer="l1"), _dense()),
        lambda: {"loss": _compare_rows, "metrics": [Spread()]},
        Data(X, VALUES, WEIGHTS[:, None]),
    ),
    "metric_of_all_rows": (_stack(_dense()), _mse(metrics=lambda: [Spread()]), REGRESSION),
    "sum_of_rows": (
        _stack(_dense()),
        lambda: {"loss": keras.losses.MeanSquaredError(reduction="sum"), "metrics": ["mse"]},
        REGRESSION,
    ),
    "mean_with_sample_weight": (
        _stack(_dense()),
        lambda: {"loss": keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")},
        Data(X, VALUES, WEIGHTS),
    ),
    "added_mean": (
        _stack(_dense(), lambda: Adds(lambda x: ops.mean(ops.square(x)))),
        _mse(),
        REGRESSION,
    ),
    "added_sum": (
        _stack(_dense(), lambda: Adds(lambda x: 0.01 * ops.sum(ops.square(x)))),
        _mse(),
        REGRESSION,
    ),
    "added_rows": (
        _stack(_dense(), lambda: Adds(lambda x: 0.1 * ops.sum(ops.square(x), axis=-1))),
        _mse(),
        REGRESSION,
    ),
    "regularizers": (
        _stack(_dense(activity_regularizer="l2", kernel_regularizer="l1")),
        _mse(),
        REGRESSION,
    ),
    "two_outputs": (_make_two_outputs, _compile_two("mse"), TWO),
    "two_outputs_of_all_rows": (_make_two_outputs, _compile_two(_compare_rows), TWO),
    "own_compute_loss": (_make_own_loss, dict, REGRESSION),
    "masks": (_make_tagger, _compile_tagger("sum_over_batch_size"), SENTENCES),
    "masks_and_weights": (_make_tagger, _compile_tagger("mean_with_sample_weight"), SENTENCES),
    "accumulated_gradients": (
        _stack(_dense()),
        _mse(
            optimizer=lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2, clipnorm=0.1)
        ),
        REGRESSION,
    ),
    "scaled_loss": (
        _stack(_dense()),
        _mse(optimizer=lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))),
        REGRESSION,
    ),
    "two_steps_per_execution": (
        _stack(_dense()),
        _mse(steps_per_execution=lambda: 2, metrics=lambda: ["mae"]),
        REGRESSION,
    ),
    "op_by_op": (_stack(_dense()), _mse(run_eagerly=lambda: True), REGRESSION),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(list(CASES), len(CASES) // 2))
def test_a_loss_or_metric_gives_the_numbers_of_keras_alone(name: str) -> None:
    make, arguments, data = CASES[name]
    expected = train(None, make, arguments, data, BATCH)
    for replicas in (3, 8):
        check_equal(train(make_strategy(replicas), make, arguments, data, BATCH), expected, 2e-5)


def test_class_weights_and_validation_data_give_the_numbers_of_keras_alone() -> None:
    def compile_arguments() -> dict[str, Any]:
        return {"loss": "sparse_categorical_crossentropy", "metrics": ["accuracy"]}

    make, data = _stack(_dense(activation="softmax")), Data(X, LABELS)
    more = {
        "class_weight": {0: 1.0, 1: 3.0, 2: 0.2},
        "validation_data": (X[:5], LABELS[:5], WEIGHTS[:5]),
    }
    expected = train(None, make, compile_arguments, data, BATCH, **more)
    check_equal(train(make_strategy(3), make, compile_arguments, data, BATCH, **more), expected)


def test_an_added_loss_that_is_zero_in_the_first_step_gives_the_numbers_of_keras_alone() -> None:
    zeros = {"kernel_initializer": "zeros", "activity_regularizer": "l2"}
    make, data = _stack(_dense(**zeros)), Data(X, LABELS)

    def compile_arguments() -> dict[str, Any]:
        return {"loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True)}

    expected = train(None, make, compile_arguments, data, BATCH)
    check_equal(train(make_strategy(3), make, compile_arguments, data, BATCH), expected)


def _spread_out(y_true: Any, y_pred: Any) -> Any:
    """A loss with the standard deviation over the rows, in which JAX has a nan."""
    return ops.mean((y_true - y_pred) ** 2, -1) + ops.mean(ops.relu(1 - ops.std(y_pred, axis=0)))


@pytest.mark.parametrize("batch_size", [8, 5])
def test_a_standard_deviation_over_an_uneven_batch_is_that_of_keras_alone(batch_size: int) -> None:
    make = _stack(_dense())

    def compile_arguments() -> dict[str, Any]:
        return {"loss": _spread_out}

    expected = train(None, make, compile_arguments, REGRESSION, batch_size)
    check_equal(train(make_strategy(2), make, compile_arguments, REGRESSION, batch_size), expected)
