"""Computes losses of Keras on the rows of one replica; see Note [Shares of a batch]."""

import functools
import math
from collections.abc import Callable
from typing import Any

from jaxdist._keras.rows import Rows, current_rows
from jaxdist._keras.source import keras_module

# Losses of Keras whose value for a row depends only on this row. `dice` and `tversky` are sums
# over all rows by default.
_BY_ROW = (
    "mean_squared_error",
    "mean_absolute_error",
    "mean_absolute_percentage_error",
    "mean_squared_logarithmic_error",
    "huber",
    "log_cosh",
    "hinge",
    "squared_hinge",
    "categorical_hinge",
    "kl_divergence",
    "poisson",
    "binary_crossentropy",
    "binary_focal_crossentropy",
    "categorical_crossentropy",
    "categorical_focal_crossentropy",
    "sparse_categorical_crossentropy",
    "categorical_generalized_cross_entropy",
    "ctc",
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
