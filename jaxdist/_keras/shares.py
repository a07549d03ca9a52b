"""Computes losses and metrics of Keras on the rows of one replica.

See Note [Shares of a batch].
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from jaxdist._keras.rows import Rows, current_rows
from jaxdist._keras.source import keras_module

# Losses of Keras whose value for a row depends only on this row. `dice` and `tversky` are sums
# over all rows by default.
_BY_ROW = tuple(
    """
    mean_squared_error mean_absolute_error mean_absolute_percentage_error
    mean_squared_logarithmic_error huber log_cosh hinge squared_hinge categorical_hinge
    kl_divergence poisson binary_crossentropy binary_focal_crossentropy categorical_crossentropy
    categorical_focal_crossentropy sparse_categorical_crossentropy
    categorical_generalized_cross_entropy ctc
    """.split()
)
_REDUCTIONS = ("sum_over_batch_size", "mean", "sum", "mean_with_sample_weight")


@functools.cache
def functions_by_row() -> frozenset[Callable[..., Any]]:
    """Return the functions of Keras that compute a loss for each row separately."""
    module = keras_module("losses.losses")
    return frozenset(getattr(module, name) for name in _BY_ROW)


def has_shares(model: Any) -> bool:
    """Whether each replica can compute its share of the loss of this model."""
    trainer = keras_module("trainers.trainer").Trainer
    if type(model).compute_loss is not trainer.compute_loss:
        return False
    compiled = model._compile_loss
    if compiled is None:
        return True
    kind = keras_module("trainers.compile_utils").CompileLoss
    return type(compiled) is kind and all(_has_share(x.loss) for x in compiled._flat_losses or ())


def _has_share(loss: Any) -> bool:
    wrapper = keras_module("losses.losses").LossFunctionWrapper
    return (
        isinstance(loss, wrapper)
        and type(loss).call is wrapper.call
        and type(loss).__call__ is keras_module("losses.loss").Loss.__call__
        and getattr(loss, "fn", None) in functions_by_row()
        and loss.reduction in _REDUCTIONS
        and loss._fn_kwargs.get("axis", -1) == -1
    )


def add_shares_to(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `Loss.__call__` that computes the share of a replica in its step."""

    @functools.wraps(call)
    def call_by_share(self: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        rows = current_rows()
        if rows is None or not rows.has_shares:
            return call(self, y_true, y_pred, sample_weight)
        return _compute_share(self, y_true, y_pred, sample_weight, rows)

    return call_by_share


def _compute_share(loss: Any, y_true: Any, y_pred: Any, sample_weight: Any, rows: Rows) -> Any:
    """Do the same as `Loss.__call__`, with the number of rows of the global batch."""
    backend, ops = keras_module("backend"), keras_module("ops")
    in_mask = backend.get_keras_mask(y_pred)
    with ops.name_scope(loss.name):
        y_pred = ops.convert_to_tensor(y_pred, dtype=loss.dtype)
        y_true = ops.convert_to_tensor(y_true, dtype=loss.dtype)
        values = loss.call(y_true, y_pred)
        masks = [m for m in (in_mask, backend.get_keras_mask(values)) if m is not None]
        mask = functools.reduce(lambda a, b: a & b, masks) if masks else None
        values = ops.convert_to_tensor(values, dtype=loss.dtype)
        weight = None
        if sample_weight is not None:
            weight = ops.convert_to_tensor(sample_weight, dtype=loss.dtype)
        weight = _apply_mask(weight, mask, values.dtype, loss.reduction, rows)
        if weight is not None:
            weight = ops.cast(weight, values.dtype)
            fit_ranks = keras_module("losses.loss").squeeze_or_expand_to_same_rank
            values, weight = fit_ranks(values, weight)
            values = values * weight
        total = ops.sum(values)
        if loss.reduction == "sum":
            return total
        if loss.reduction == "mean_with_sample_weight" and weight is not None:
            return ops.divide_no_nan(total, rows.add_up(ops.cast(ops.sum(weight), total.dtype)))
        return total / (rows.total * math.prod(values.shape[1:]))


def _apply_mask(weight: Any, mask: Any, dtype: Any, reduction: str, rows: Rows) -> Any:
    """Do the same as `apply_mask` of Keras, with the mask of the global batch."""
    loss_module, ops = keras_module("losses.loss"), keras_module("ops")
    if mask is None or reduction not in ("mean", "sum_over_batch_size"):
        return loss_module.apply_mask(weight, mask, dtype=dtype, reduction=reduction)
    total = rows.total * math.prod(mask.shape[1:])
    valid = rows.add_up(ops.sum(ops.cast(mask, dtype)))
    each = ops.divide_no_nan(ops.cast(total, dtype), valid)
    of_mask = ops.where(ops.cast(mask, "bool"), each, ops.cast(0, dtype))
    if weight is None:
        return of_mask
    of_mask, weight = loss_module.squeeze_or_expand_to_same_rank(of_mask, ops.cast(weight, dtype))
    return weight * of_mask


def compute_loss(
    model: Any, variables: Sequence[Any], data: Sequence[Any], added: list[Any], training: bool
) -> tuple[Any, list[Any], list[Any]]:
    """Return the loss of `compile`, and the variables after it that are not trainable.

    Args:
        model: The model.
        variables: The values of its trainable variables, of the others, and of its metrics.
        data: `x`, `y`, outputs and weights.
        added: The losses that the call of the model added.
        training: Whether it is a step of training.
    """
    names = ("x", "y", "y_pred", "sample_weight")
    given = dict(zip(names, data, strict=True))
    if added:
        model._losses_override.clear()
        model._losses_override = added
    try:
        loss, (_, fixed, of_metrics) = model.stateless_compute_loss(
            *variables, training=training, **given
        )
    finally:
        if added:
            model._losses_override.clear()
    return loss, fixed, of_metrics


# Classes whose variables grow by a sum over the rows.
_SUMS = tuple(
    """
    FalsePositives FalseNegatives TrueNegatives TruePositives Precision Recall
    SensitivityAtSpecificity SpecificityAtSensitivity PrecisionAtRecall RecallAtPrecision AUC
    FBetaScore F1Score IoU BinaryIoU MeanIoU OneHotIoU OneHotMeanIoU RootMeanSquaredError
    R2Score
    """.split()
)
# Classes that are the mean of a Keras function which computes a value for each row separately.
_MEANS = tuple(
    """
    BinaryAccuracy CategoricalAccuracy SparseCategoricalAccuracy TopKCategoricalAccuracy
    SparseTopKCategoricalAccuracy Accuracy Hinge SquaredHinge CategoricalHinge KLDivergence
    Poisson BinaryCrossentropy CategoricalCrossentropy SparseCategoricalCrossentropy
    MeanSquaredError MeanAbsoluteError MeanAbsolutePercentageError MeanSquaredLogarithmicError
    LogCoshError
    """.split()
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


def finish(
    model: Any, values: Sequence[Any], loss: Any, data: Any, total: Any
) -> tuple[Any, list[Any]]:
    """Add the loss of a batch of `total` rows; return the logs and the metric variables.

    `data` is the global batch `(x, y, y_pred, sample_weight)`, with which all metrics are updated;
    None if they have been.
    """
    with open_scope(model.metrics_variables, values) as scope:
        model._loss_tracker.update_state(loss, sample_weight=total)
        logs = model.get_metrics_result() if data is None else model.compute_metrics(*data)
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
    return finish(model, added, loss, data, total)


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
