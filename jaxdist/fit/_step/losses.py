"""Losses: which functions `compile` takes, and how their values are weighted."""

import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxdist._validate import check_callable, show
from jaxdist.errors import ArgumentError, ArgumentTypeError, ShapeError

Loss = Callable[[Any, Any], Any]

# Parameters that say that a function takes the predictions first, as those of optax do.
_PREDICTIONS = {"logits", "log_predictions", "y_pred", "predictions", "prediction", "outputs"}

# Names of Keras whose values do not depend on whether a model returns logits or probabilities.
_BY_NAME: dict[str, Loss] = {
    "mean_squared_error": lambda y_true, y_pred: jnp.square(y_pred - y_true),
    "mean_absolute_error": lambda y_true, y_pred: jnp.abs(y_pred - y_true),
    "huber": lambda y_true, y_pred: optax.huber_loss(y_pred, y_true),
    "log_cosh": lambda y_true, y_pred: optax.log_cosh(y_pred, y_true),
}
_SHORT = {"mse": "mean_squared_error", "mae": "mean_absolute_error"}
# Keras takes probabilities for these names. A model of Flax usually returns logits, and nothing in
# the values tells which they are, so the name alone could train on wrong numbers.
_OF_LOGITS = {
    "sparse_categorical_crossentropy": "softmax_cross_entropy_with_integer_labels",
    "categorical_crossentropy": "softmax_cross_entropy",
    "binary_crossentropy": "sigmoid_binary_cross_entropy",
}
CALLER = "fit.Model.compile"


def find_loss(loss: Any) -> Loss:
    """Return a loss as a function of `(y_true, y_pred)`.

    Raises:
        ArgumentError: An unknown name, or one that means probabilities in Keras.
        ArgumentTypeError: It is neither a name nor a function.
    """
    if isinstance(loss, str):
        return _find_by_name(loss)
    check_callable(CALLER, loss, "loss", "Pass a function (y_true, y_pred) -> [b].")
    return order_arguments(loss)


def order_arguments(function: Callable[..., Any]) -> Loss:
    """Return a function of `(y_true, y_pred)`, also for one that takes the predictions first."""
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return function
    if names and names[0] in _PREDICTIONS:
        return lambda y_true, y_pred: function(y_pred, y_true)
    return function


def _find_by_name(name: str) -> Loss:
    name = _SHORT.get(name, name)
    if name in _OF_LOGITS:
        raise ArgumentError(
            f"{CALLER} was given loss={name!r}.\n\n"
            "That name means a loss of probabilities in Keras. A Flax model usually returns "
            "logits, and jaxdist cannot see which of the two it gets.\n\n"
            f"Pass loss=optax.{_OF_LOGITS[name]}, which takes logits."
        )
    if name not in _BY_NAME:
        raise ArgumentError(
            f"{CALLER} was given loss={name!r}.\n\n"
            f"Losses with a name are {', '.join([*_SHORT, *_BY_NAME])}.\n\n"
            "Pass one of these, or a function (y_true, y_pred) -> [b], or one of optax."
        )
    return _BY_NAME[name]


def check_values(caller: str, what: str, values: Any, rows: int) -> jax.Array:
    """Return what a loss or metric returned, or raise if it has no value for each example.

    Raises:
        ArgumentTypeError: It is no array.
        ShapeError: Its dim 0 is not the number of examples.
    """
    if not isinstance(values, jax.Array):
        raise ArgumentTypeError(
            f"{caller} called {what}, and it returned {show(values)}.\n\n"
            "It returns one value for each example: an array [b] or [b, ...].\n\n"
            "Return an array of JAX."
        )
    if values.ndim == 0:
        raise ShapeError(
            f"{caller} called {what} with {rows} examples, and it returned a scalar.\n\n"
            "It returns one value for each example, [b] or [b, ...], so that padding, weights and "
            "batches of different sizes count exactly.\n\n"
            "Remove the mean or sum at its end: return losses instead of losses.mean()."
        )
    if values.shape[0] != rows:
        raise ShapeError(
            f"{caller} called {what} with {rows} examples, and it returned an array of shape "
            f"{list(values.shape)}.\n\n"
            "Dim 0 of what it returns is the examples, [b] or [b, ...].\n\n"
            "Reduce other dims only: for instance losses.mean(axis=-1)."
        )
    return values


def sum_weighted(values: jax.Array, weight: jax.Array | None) -> jax.Array:
    """Return the sum over examples of weight times the mean over the other dims, in float32.

    Shapes:
        In: `values` `[b, ...]`; `weight` `[b]` or the first dims of `values`.
        Out: `[]`.
    """
    values = values.astype(jnp.promote_types(values.dtype, jnp.float32))
    per_example = math.prod(values.shape[1:])
    if weight is None:
        return jnp.sum(values) / max(per_example, 1)
    weight = weight.astype(values.dtype).reshape(weight.shape + (1,) * (values.ndim - weight.ndim))
    # `where` instead of a product alone: a padded row may hold NaN, and NaN * 0 is NaN.
    counted = jnp.where(weight != 0, values * weight, 0)
    return jnp.sum(counted) / max(per_example, 1)
