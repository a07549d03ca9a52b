"""Finds the losses of `compile`, and weights their values."""

import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxdist._called import called, name_call, refuse, refuse_type
from jaxdist._validate import check_callable, is_array, show
from jaxdist._values import wide_dtype
from jaxdist.errors import ArgumentTypeError, ShapeError

Loss = Callable[[Any, Any], Any]

# Names of parameters which show that a function takes predictions first, as in optax: the first
# parameter is a prediction, or the second one is a target.
_PREDICTIONS = {
    *("logits", "log_predictions", "y_pred", "predictions", "prediction", "predicted", "preds"),
    *("pred", "output", "outputs", "predictor_outputs", "scores", "y_hat", "yhat"),
}
_TARGETS = {"labels", "label", "targets", "target", "log_targets", "y_true"}


def _compare(name: str, compare: Callable[[Any, Any], Any]) -> Loss:
    """Return a loss of one array of predictions and one of targets, of the same shape."""

    def loss(y_true: Any, y_pred: Any) -> Any:
        check_same_shape(f"the loss or metric {name!r}", y_true, y_pred)
        true, pred = _as_float(y_true, y_pred), _as_float(y_pred, y_true)
        return compare(true, pred)

    return loss


def _as_float(array: Any, other: Any) -> Any:
    """Return integers as floats: their differences may not fit into their dtype, nor into bfloat16.

    `other` is the array that they are compared with.
    """
    if jnp.issubdtype(array.dtype, jnp.inexact):
        return array
    is_float = jnp.issubdtype(other.dtype, jnp.inexact)
    return array.astype(wide_dtype(other.dtype) if is_float else float)


# Keras names whose values do not depend on whether a model returns logits or probabilities.
_BY_NAME: dict[str, Loss] = {
    "mean_squared_error": _compare("mse", lambda y_true, y_pred: jnp.square(y_pred - y_true)),
    "mean_absolute_error": _compare("mae", lambda y_true, y_pred: jnp.abs(y_pred - y_true)),
    "huber": _compare("huber", lambda y_true, y_pred: optax.huber_loss(y_pred, y_true)),
    "log_cosh": _compare("log_cosh", lambda y_true, y_pred: optax.log_cosh(y_pred, y_true)),
}
_SHORT = {"mse": "mean_squared_error", "mae": "mean_absolute_error"}
# Keras takes probabilities for these names. A Flax model usually returns logits, and the values
# do not show which they are, so the name alone could train on wrong numbers.
_OF_LOGITS = {
    "sparse_categorical_crossentropy": "softmax_cross_entropy_with_integer_labels",
    "categorical_crossentropy": "softmax_cross_entropy",
    "binary_crossentropy": "sigmoid_binary_cross_entropy",
}
CALLER = "fit.Model.compile"


@called(CALLER)
def find_loss(loss: Any) -> Loss:
    """Return a loss as a function of `(y_true, y_pred)`.

    Raises:
        ArgumentError: A name is unknown, or means probabilities in Keras.
        ArgumentTypeError: The loss is neither a name nor a function.
    """
    if isinstance(loss, str):
        return _find_by_name(loss)
    if loss is None:
        raise refuse_type(
            "no loss.",
            f"A loss is a name, {', '.join([*_SHORT, *_BY_NAME])}, or a function (y_true, y_pred) "
            "-> [b], or one of optax.",
            "Pass for instance loss=optax.softmax_cross_entropy_with_integer_labels for classes, "
            "or loss='mse' for numbers.",
        )
    check_callable(loss, "loss", "Pass a function (y_true, y_pred) -> [b].")
    return order_arguments(loss)


def order_arguments(function: Callable[..., Any]) -> Loss:
    """Return a function of `(y_true, y_pred)`, even if `function` takes predictions first."""
    if function is optax.softmax_cross_entropy_with_integer_labels:
        return _compare_classes
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return function
    is_first = names[:1] and names[0] in _PREDICTIONS
    is_second = len(names) > 1 and names[1] in _TARGETS and names[0] not in _TARGETS
    if is_first or is_second:
        return lambda y_true, y_pred: function(y_pred, y_true)
    return function


def _compare_classes(y_true: Any, y_pred: Any) -> Any:
    """Return the cross-entropy of classes; nan for a label that is not a class.

    Without the nan, JAX counts a negative label from the last class.
    """
    losses = optax.softmax_cross_entropy_with_integer_labels(y_pred, y_true)
    is_class = (y_true >= 0) & (y_true < y_pred.shape[-1])
    return jnp.where(is_class, losses, jnp.nan)


def as_classes(y: jax.Array) -> jax.Array:
    """Return targets as int32, and -1 for a number that cannot be a class: 1.7, nan, ±2**32."""
    if jnp.issubdtype(y.dtype, jnp.floating):
        wide = y.astype(wide_dtype(y.dtype))
        is_class = (wide >= 0) & (wide < 2.0**31) & (wide == jnp.floor(wide))
        return jnp.where(is_class, wide, -1).astype(jnp.int32)
    if y.dtype.itemsize < 4 or y.dtype == jnp.int32:
        return y.astype(jnp.int32)
    if not jnp.issubdtype(y.dtype, jnp.integer):
        return y
    # Integers of 64 bits, and uint32.
    return jnp.where((y >= 0) & (y <= 2**31 - 1), y.astype(jnp.int32), -1)


def _find_by_name(name: str) -> Loss:
    name = _SHORT.get(name, name)
    if name in _OF_LOGITS:
        raise refuse(
            f"loss={name!r}.",
            "That name means a loss of probabilities in Keras. A Flax model usually returns "
            "logits, and jaxdist cannot see which of the two it gets.",
            f"Pass loss=optax.{_OF_LOGITS[name]}, which takes logits.",
        )
    if name not in _BY_NAME:
        raise refuse(
            f"loss={name!r}.",
            f"The names of losses are {', '.join([*_SHORT, *_BY_NAME])}.",
            "Pass one of these, or a function (y_true, y_pred) -> [b], or one of optax.",
        )
    return _BY_NAME[name]


def align(y_true: Any, y_pred: Any) -> tuple[Any, Any]:
    """Return targets and predictions with the same rank, if one of them has a last dim of 1.

    Keras does the same. Without it, `[b]` minus `[b, 1]` is `[b, b]`.
    """
    if not (is_array(y_true) and is_array(y_pred)):
        return y_true, y_pred
    true, pred = jnp.shape(y_true), jnp.shape(y_pred)
    if (*true, 1) == pred:
        return (y_true[..., None], y_pred) if len(true) == 1 else (y_true, y_pred[..., 0])
    if (*pred, 1) == true:
        return y_true[..., 0], y_pred
    return y_true, y_pred


def check_same_shape(what: str, y_true: Any, y_pred: Any) -> None:
    """Raise if targets and predictions are not two arrays of one shape."""
    for name, value in (("the targets, y,", y_true), ("the outputs of the model", y_pred)):
        if not is_array(value):
            raise ArgumentTypeError(
                f"fit.Model called {what}, and {name} are {show(value)}.\n\n"
                "It compares one array of targets with one of outputs.\n\n"
                "Pass a function (y_true, y_pred) -> [b] that takes what it needs of them."
            )
    if jnp.shape(y_true) != jnp.shape(y_pred):
        raise ShapeError(
            f"fit.Model called {what} with targets y of local shape {list(jnp.shape(y_true))}, and "
            f"outputs of the model of local shape {list(jnp.shape(y_pred))}.\n\n"
            "It compares each output with its own target, and nothing is repeated.\n\n"
            "Pass y with the shape of the outputs."
        )


def measure_examples(what: str, function: Loss, y_true: Any, y_pred: Any, rows: int) -> jax.Array:
    """Return the values of a loss or metric, or raise if they are not one for each example.

    Raises:
        ArgumentTypeError: They are not an array, or they are complex.
        ShapeError: There is not one for each example, or one depends on several examples.
    """
    try:
        found = function(y_true, y_pred)
    except Exception as error:
        shapes = [
            [list(jnp.shape(leaf)) for leaf in jax.tree.leaves(tree)] for tree in (y_true, y_pred)
        ]
        kinds = sorted({str(getattr(leaf, "dtype", "?")) for leaf in jax.tree.leaves(y_true)})
        error.add_note(
            f"Raised by {what}, for targets y of local shape {shapes[0]} and dtype "
            f"{', '.join(kinds)}, and outputs of the model of local shape {shapes[1]}. Losses of "
            "classes take y [N] of integers: y.astype('int32'), y[:, 0] for [N, 1], and "
            "y.argmax(axis=-1) for one-hot y."
        )
        raise
    values = check_values(what, found, rows)
    # A dim of the size of the batch may be a coincidence. So check if it grows with the batch.
    if rows in values.shape[1:] and rows > 1:
        twice = shapes_of_twice(function, (y_true, y_pred), rows)
        if twice is not None and twice[1:] != values.shape[1:]:
            raise ShapeError(
                f"{name_call()} called {what} with {rows} examples, and it returned values of "
                f"shape {list(values.shape)}: each example was compared with all others.\n\nIt "
                "returns the values of single examples, [b] or [b, ...]. Arrays [b] and [b, 1] "
                "together give [b, b] without an error.\n\nGive both the same dims in it, such as "
                "y_pred[:, 0]; or if you want all pairs, return the mean of each row: "
                "losses.mean(axis=-1)."
            )
    return values


def shapes_of_twice(function: Callable[..., Any], args: tuple[Any, ...], rows: int) -> Any:
    """Return the shapes that a function returns for twice the examples; None if it raises."""

    def double(leaf: Any) -> Any:
        if jnp.shape(leaf)[:1] != (rows,):
            return leaf
        return jax.ShapeDtypeStruct((2 * rows, *leaf.shape[1:]), leaf.dtype)

    try:
        found = jax.eval_shape(function, *jax.tree.map(double, args))
    except Exception:  # The user's function may only work for this number of examples.
        return None
    return jax.tree.map(lambda leaf: tuple(leaf.shape), found)


def check_values(what: str, values: Any, rows: int) -> jax.Array:
    """Return the values of a loss or metric, or raise if there is not one for each example.

    Raises:
        ArgumentTypeError: The result is not an array, or its values are complex.
        ShapeError: Its dim 0 is not the number of examples.
    """
    if not isinstance(values, jax.Array):
        raise ArgumentTypeError(
            f"{name_call()} called {what}, and it returned {show(values)}.\n\n"
            "It returns one value for each example: an array [b] or [b, ...].\n\n"
            "Return an array of JAX."
        )
    if jnp.issubdtype(values.dtype, jnp.complexfloating):
        raise ArgumentTypeError(
            f"{name_call()} called {what}, and it returned {values.dtype} values.\n\n"
            "Values are real numbers: complex ones have no order, and no mean that fit shows.\n\n"
            "Return for instance jnp.abs(y_pred - y_true) ** 2."
        )
    if values.ndim == 0:
        raise ShapeError(
            f"{name_call()} called {what} with {rows} examples, and it returned a scalar.\n\n"
            "It returns one value for each example, [b] or [b, ...], so that padding, weights and "
            "batches of different sizes count exactly.\n\n"
            "Remove the mean or sum at its end: return losses instead of losses.mean()."
        )
    if values.shape[0] != rows:
        raise ShapeError(
            f"{name_call()} called {what} with {rows} examples, and it returned an array of shape "
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
    values = values.astype(wide_dtype(values.dtype))
    per_example = math.prod(values.shape[1:])
    if weight is None:
        return jnp.sum(values) / max(per_example, 1)
    weight = weight.astype(values.dtype).reshape(weight.shape + (1,) * (values.ndim - weight.ndim))
    # `where` instead of only a product: a padded row may hold NaN, and NaN * 0 is NaN.
    counted = jnp.where(weight != 0, values * weight, 0)
    return jnp.sum(counted) / max(per_example, 1)
