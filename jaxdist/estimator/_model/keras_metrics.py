"""Computes the metrics of a compiled Keras model for each row."""

from typing import Any

import jax.numpy as jnp

from jaxdist._called import refuse
from jaxdist._keras import keras_module
from jaxdist.errors import UnsupportedError


def check_metrics(model: Any) -> None:
    """Check that each metric of `compile` is a mean over rows.

    Raises:
        UnsupportedError: A metric is not a mean over rows, or the model has several outputs.
    """
    wrapper = keras_module("metrics.reduction_metrics").MeanMetricWrapper
    # A model without a list of outputs is a subclass with its own `call`.
    count = len(getattr(model, "outputs", None) or [None])
    for metric in _list_metrics(model):
        is_mean = isinstance(metric, wrapper) and type(metric).update_state is wrapper.update_state
        if is_mean and count == 1:
            continue
        why = (
            f"the metric {metric.name!r}, a {type(metric).__name__}"
            if not is_mean
            else f"metrics for {count} outputs"
        )
        raise refuse(
            f"the Keras model {model.name!r} with {why}.",
            "An evaluation of an Estimator takes the mean of a value of each row of one output.",
            "Leave it out of compile, or evaluate with the model's own evaluate.",
            kind=UnsupportedError,
        )


def compute_metrics(model: Any, labels: Any, predictions: Any) -> dict[str, Any]:
    """Return each metric of `compile` for each row; with a mask, also the weights of the rows."""
    found: dict[str, Any] = {}
    mask = keras_module("backend").get_keras_mask(predictions)
    for metric in _list_metrics(model):
        values = metric._fn(labels, predictions, **metric._fn_kwargs)
        values, weights = keras_module("metrics.reduction_metrics").reduce_to_samplewise_values(
            values, mask, jnp.mean, metric.dtype
        )
        if weights is None:
            found[metric.name] = values
        else:
            # Keras divides the sum of the weighted values by the sum of the weights.
            own = jnp.where(weights > 0, values / jnp.where(weights > 0, weights, 1), 0)
            found[metric.name] = (own, weights)
    return found


def _list_metrics(model: Any) -> list[Any]:
    return [] if model._compile_metrics is None else list(model._compile_metrics.metrics)
