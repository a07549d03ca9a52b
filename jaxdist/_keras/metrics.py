"""Updates metrics of Keras on the rows of one replica; see Note [Shares of a batch]."""

import functools
from collections.abc import Sequence
from typing import Any

from jaxdist._keras.losses import functions_by_row
from jaxdist._keras.source import keras_module

# Classes whose variables grow by a sum over the rows.
_SUMS = (
    "FalsePositives",
    "FalseNegatives",
    "TrueNegatives",
    "TruePositives",
    "Precision",
    "Recall",
    "SensitivityAtSpecificity",
    "SpecificityAtSensitivity",
    "PrecisionAtRecall",
    "RecallAtPrecision",
    "AUC",
    "FBetaScore",
    "F1Score",
    "IoU",
    "BinaryIoU",
    "MeanIoU",
    "OneHotIoU",
    "OneHotMeanIoU",
    "RootMeanSquaredError",
    "R2Score",
)
# Classes that are the mean of a Keras function which computes a value for each row separately.
_MEANS = (
    "BinaryAccuracy",
    "CategoricalAccuracy",
    "SparseCategoricalAccuracy",
    "TopKCategoricalAccuracy",
    "SparseTopKCategoricalAccuracy",
    "Accuracy",
    "Hinge",
    "SquaredHinge",
    "CategoricalHinge",
    "KLDivergence",
    "Poisson",
    "BinaryCrossentropy",
    "CategoricalCrossentropy",
    "SparseCategoricalCrossentropy",
    "MeanSquaredError",
    "MeanAbsoluteError",
    "MeanAbsolutePercentageError",
    "MeanSquaredLogarithmicError",
    "LogCoshError",
)


def have_increments(model: Any) -> bool:
    """Whether the increments of this model's metrics can be added up over the replicas."""
    trainer = keras_module("trainers.trainer").Trainer
    if type(model).compute_metrics is not trainer.compute_metrics:
        return False
    compiled = model._compile_metrics
    if compiled is None:
        return True
    kind = keras_module("trainers.compile_utils").CompileMetrics
    return type(compiled) is kind and all(_has_increments(m) for m in compiled.metrics)


def _has_increments(metric: Any) -> bool:
    sums, means, wrapper = _classes()
    if type(metric) in sums:
        return True
    if type(metric) is wrapper and metric._fn not in functions_by_row():
        return False
    # `axis` may be the axis of the rows.
    is_mean = type(metric) in means or type(metric) is wrapper
    return is_mean and metric._fn_kwargs.get("axis", -1) == -1


@functools.cache
def _classes() -> tuple[frozenset[type], frozenset[type], type]:
    module = keras_module("metrics")
    sums = frozenset(getattr(module, name) for name in _SUMS)
    means = frozenset(getattr(module, name) for name in _MEANS)
    return sums, means, module.MeanMetricWrapper


def update_compiled(model: Any, values: Sequence[Any], y: Any, y_pred: Any, weight: Any) -> Any:
    """Update the metrics of `compile` with these rows, and return the metric variables."""
    if model._compile_metrics is None:
        return list(values)
    with open_scope(model.metrics_variables, values) as scope:
        model._compile_metrics.update_state(y, y_pred, weight)
    return read_scope(scope, model.metrics_variables)


def finish(model: Any, values: Sequence[Any], loss: Any, total: int) -> tuple[Any, list[Any]]:
    """Add the loss of a batch of `total` rows; return the logs and the metric variables."""
    with open_scope(model.metrics_variables, values) as scope:
        model._loss_tracker.update_state(loss, sample_weight=total)
        logs = model.get_metrics_result()
    return logs, read_scope(scope, model.metrics_variables)


def compute_on_all(
    model: Any, values: Sequence[Any], loss: Any, data: tuple[Any, Any, Any, Any], total: int
) -> tuple[Any, list[Any]]:
    """Update all metrics with the global batch `(x, y, y_pred, sample_weight)`."""
    with open_scope(model.metrics_variables, values) as scope:
        model._loss_tracker.update_state(loss, sample_weight=total)
        logs = model.compute_metrics(*data)
    return logs, read_scope(scope, model.metrics_variables)


def add_to_metrics(
    model: Any, values: Sequence[Any], after: Sequence[Any], loss: Any, data: Any, total: Any
) -> tuple[Any, list[Any]]:
    """Add the increments of a batch of `total` rows, from metrics that began with zeros.

    Args:
        model: The model.
        values: The metric variables before.
        after: The metric variables of the batch alone.
        loss: The loss of the batch.
        data: `(x, y, y_pred, sample_weight)` if metrics are computed from it, else None.
        total: The number of rows.

    Returns:
        The logs, and the metric variables.
    """
    pairs = zip(values, after, strict=True)
    added = [old + increment.astype(old.dtype) for old, increment in pairs]
    if data is None:
        return finish(model, added, loss, total)
    return compute_on_all(model, added, loss, data, total)


def scale_loss_trackers(model: Any, increments: Sequence[Any], factor: float) -> list[Any]:
    """Return the increments, with those of the loss of each output multiplied by `factor`.

    Keras weights the loss of an output by the rows that it sees. A share has the weight of the rows
    of one replica, but belongs to the rows of all.
    """
    compiled = model._compile_loss
    trackers = () if compiled is None else compiled.metrics
    totals = {id(tracker.total) for tracker in trackers}
    pairs = zip(model.metrics_variables, increments, strict=True)
    return [x * factor if id(v) in totals else x for v, x in pairs]


def open_scope(variables: Sequence[Any], values: Sequence[Any]) -> Any:
    """Return a scope of Keras in which the variables have these values."""
    pairs = list(zip(variables, values, strict=True))
    return keras_module("backend").StatelessScope(state_mapping=pairs)


def read_scope(scope: Any, variables: Sequence[Any]) -> list[Any]:
    """Return the values of the variables in a scope of Keras."""
    return [scope.get_current_value(v) for v in variables]
