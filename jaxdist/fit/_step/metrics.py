"""Metrics that are exact for any split of the examples: a function of sums over examples."""

import abc
from collections.abc import Callable, Mapping
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist._called import called, refuse
from jaxdist._validate import check_callable, check_text
from jaxdist.errors import ShapeError
from jaxdist.fit._step.losses import (
    align,
    find_loss,
    measure_examples,
    order_arguments,
    sum_weighted,
)

Sums = Mapping[str, np.ndarray]


class Metric(abc.ABC):
    """A metric: sums over the examples of a batch, and a result computed from them.

    jaxdist adds the sums of all replicas and batches, in 64 bits, and calls `result` once. So a
    metric has the same value for any number of replicas and any batch size.

    Args:
        name: The name in logs and in `History`.

    Example:
        >>> class LargestShare(fit.Metric):
        ...     def sums(self, y_true, y_pred, weight):
        ...         return {"over": jnp.sum(weight * (y_pred > 1)), "all": jnp.sum(weight)}
        ...     def result(self, sums):
        ...         return sums["over"] / sums["all"]
        >>> LargestShare("share").result({"over": 3.0, "all": 4.0})
        0.75

    Source:
        `keras.metrics.Metric`, whose state is variables; here it is sums.
    """

    # Whether `sums` takes weights of single values, `[b, ...]`, not only of examples.
    _takes_all_weights = False

    @called(lambda self: f"fit.{type(self).__name__}")
    def __init__(self, name: str) -> None:
        check_text("name", name, "accuracy")
        self.name = name

    @abc.abstractmethod
    def sums(self, y_true: Any, y_pred: Any, weight: jax.Array) -> dict[str, jax.Array]:
        """Return sums over the examples of this replica.

        Shapes:
            In: targets and predictions `[b, ...]`; `weight` `[b]`, 0 for padding. If weights have
            more dims, this is their mean for each example.
            Out: arrays of shapes that do not depend on `b`.
        """

    @abc.abstractmethod
    def result(self, sums: Sums) -> float:
        """Return the value from the sums over all examples."""


class Mean(Metric):
    """The mean of a function over the examples.

    Args:
        function: `(y_true, y_pred) -> [b]` or `[b, ...]`. Its name is the name of the metric.
        name: Another name for the metric.

    Example:
        >>> fit.Mean(lambda y_true, y_pred: jnp.abs(y_true - y_pred), "error").name
        'error'

    Source:
        `keras.metrics.MeanMetricWrapper`.
    """

    @called("fit.Mean")
    def __init__(self, function: Callable[[Any, Any], Any], name: str | None = None) -> None:
        check_callable(function, "function", "Pass (y_true, y_pred) -> [b].")
        super().__init__(name if name is not None else _name_of(function))
        self._function = order_arguments(function)

    _takes_all_weights = True
    # Whether to ignore a last dim of 1 that only the targets or only the predictions have.
    _aligns = True

    @called(lambda self: f"fit.{type(self).__name__}")
    def sums(self, y_true: Any, y_pred: Any, weight: jax.Array) -> dict[str, jax.Array]:
        if self._aligns:
            y_true, y_pred = align(y_true, y_pred)
        what = f"its function, for the metric {self.name!r},"
        values = measure_examples(what, self._function, y_true, y_pred, weight.shape[0])
        return _sum_values(self.name, values, weight)

    @final
    def result(self, sums: Sums) -> float:
        return divide(sums["total"], sums["count"])


class RootMeanSquaredError(Metric):
    """The root of the mean squared error over all elements.

    Example:
        >>> fit.RootMeanSquaredError().result({"total": 8.0, "count": 2.0})
        2.0

    Source:
        `keras.metrics.RootMeanSquaredError`.
    """

    _takes_all_weights = True

    def __init__(self, name: str = "root_mean_squared_error") -> None:
        super().__init__(name)

    @called("fit.Model")
    def sums(self, y_true: Any, y_pred: Any, weight: jax.Array) -> dict[str, jax.Array]:
        y_true, y_pred = align(y_true, y_pred)
        what, loss = f"the metric {self.name!r}", find_loss("mse")
        values = measure_examples(what, loss, y_true, y_pred, weight.shape[0])
        return _sum_values(self.name, values, weight)

    def result(self, sums: Sums) -> float:
        return divide(sums["total"], sums["count"]) ** 0.5


def _sum_values(name: str, values: jax.Array, weight: jax.Array) -> dict[str, jax.Array]:
    weight = fit_weight(name, values, weight)
    ones = jnp.ones(weight.shape, weight.dtype)
    return {"total": sum_weighted(values, weight), "count": sum_weighted(ones, weight)}


@called("fit.Model")
def fit_weight(name: str, values: jax.Array, weight: jax.Array) -> jax.Array:
    """Return weights for values; the mean over the dims that the values do not have.

    Raises:
        ShapeError: The dims of the weights are not the first dims of the values.
    """
    if weight.ndim > values.ndim:
        weight = jnp.mean(weight, axis=tuple(range(values.ndim, weight.ndim)))
    if weight.shape != values.shape[: weight.ndim]:
        raise refuse(
            f"sample_weight of local shape {list(weight.shape)}, and the metric {name!r} has "
            f"values of local shape {list(values.shape)}.",
            "A weight belongs to an example, [N], or has the first dims of the values of each of "
            "the weighted_metrics.",
            "Pass sample_weight [N], or pass this metric in metrics instead.",
            kind=ShapeError,
        )
    return weight


def divide(total: Any, count: Any) -> float:
    """Return the quotient; 0 if the count is 0."""
    return float(total) / float(count) if float(count) else 0.0


def _name_of(function: Any) -> str:
    function = getattr(function, "func", function)
    return str(getattr(function, "__name__", type(function).__name__))
