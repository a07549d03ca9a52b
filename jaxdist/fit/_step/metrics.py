"""Metrics that are exact for any split of the examples: sums over examples, and their quotient."""

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist._validate import as_integer, as_number, check_callable, check_text
from jaxdist.errors import ArgumentError, ShapeError
from jaxdist.fit._step.losses import check_values, find_loss, order_arguments, sum_weighted

Sums = Mapping[str, np.ndarray]
_CALLER = "fit.Model"


class Metric(abc.ABC):
    """A metric: sums over the examples of a batch, and a result that is computed from them.

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

    def __init__(self, name: str) -> None:
        check_text(type(self).__name__, "name", name, "accuracy")
        self.name = name

    @abc.abstractmethod
    def sums(self, y_true: Any, y_pred: Any, weight: jax.Array) -> dict[str, jax.Array]:
        """Return sums over the examples of this replica.

        Shapes:
            In: targets and predictions `[b, ...]`; `weight` `[b]`, 0 for padding.
            Out: arrays of shapes that do not depend on `b`.
        """

    @abc.abstractmethod
    def result(self, sums: Sums) -> float:
        """Return the value for the sums over all examples."""


class Mean(Metric):
    """The mean of a function over the examples.

    Args:
        function: `(y_true, y_pred) -> [b]` or `[b, ...]`. Its name is the name of the metric.
        name: Another name.

    Example:
        >>> fit.Mean(lambda y_true, y_pred: jnp.abs(y_true - y_pred), "error").name
        'error'

    Source:
        `keras.metrics.MeanMetricWrapper`.
    """

    def __init__(self, function: Callable[[Any, Any], Any], name: str | None = None) -> None:
        check_callable("fit.Mean", function, "function", "Pass (y_true, y_pred) -> [b].")
        super().__init__(name if name is not None else _name_of(function))
        self._function = order_arguments(function)

    def sums(self, y_true: Any, y_pred: Any, weight: jax.Array) -> dict[str, jax.Array]:
        values = self._function(y_true, y_pred)
        values = check_values(_CALLER, f"the metric {self.name!r}", values, weight.shape[0])
        return {"total": sum_weighted(values, weight), "count": jnp.sum(weight)}

    @final
    def result(self, sums: Sums) -> float:
        return _divide(sums["total"], sums["count"])


class Accuracy(Mean):
    """The fraction of examples whose largest output is the right class.

    Shapes:
        Predictions `[b, ..., class]`, logits or probabilities; targets `[b, ...]` of classes,
        `[b, ..., 1]`, or one-hot `[b, ..., class]`.

    Example:
        >>> fit.Accuracy().name
        'accuracy'

    Source:
        `keras.metrics.SparseCategoricalAccuracy` and `CategoricalAccuracy`.
    """

    def __init__(self, name: str = "accuracy") -> None:
        super().__init__(_is_right, name)


class BinaryAccuracy(Mean):
    """The fraction of outputs that are on the right side of a threshold.

    Args:
        threshold: 0.0 for logits, 0.5 for probabilities.

    Example:
        >>> fit.BinaryAccuracy(0.0).name
        'binary_accuracy'

    Source:
        `keras.metrics.BinaryAccuracy`.
    """

    def __init__(self, threshold: float, name: str = "binary_accuracy") -> None:
        limit = as_number("fit.BinaryAccuracy", "threshold", threshold, example=0.0)
        super().__init__(lambda y_true, y_pred: (y_pred > limit) == (y_true > 0.5), name)


class TopKAccuracy(Mean):
    """The fraction of examples whose right class is among the `k` largest outputs.

    Shapes:
        Predictions `[b, ..., class]`; targets `[b, ...]` of classes.

    Example:
        >>> fit.TopKAccuracy(5).name
        'top_5_accuracy'

    Source:
        `keras.metrics.SparseTopKCategoricalAccuracy`.
    """

    def __init__(self, k: int, name: str | None = None) -> None:
        count = as_integer("fit.TopKAccuracy", "k", k, least=1, example=5)

        def is_among(y_true: Any, y_pred: Any) -> Any:
            labels = _labels_of(y_true, y_pred)
            of_label = jnp.take_along_axis(y_pred, labels[..., None], axis=-1)
            return jnp.sum(y_pred > of_label, axis=-1) < count

        super().__init__(is_among, name or f"top_{count}_accuracy")


class RootMeanSquaredError(Metric):
    """The root of the mean squared error over all elements.

    Example:
        >>> fit.RootMeanSquaredError().result({"total": 8.0, "count": 2.0})
        2.0

    Source:
        `keras.metrics.RootMeanSquaredError`.
    """

    def __init__(self, name: str = "root_mean_squared_error") -> None:
        super().__init__(name)

    def sums(self, y_true: Any, y_pred: Any, weight: jax.Array) -> dict[str, jax.Array]:
        squares = jnp.square(y_pred - y_true)
        values = check_values(_CALLER, f"the metric {self.name!r}", squares, weight.shape[0])
        return {"total": sum_weighted(values, weight), "count": jnp.sum(weight)}

    def result(self, sums: Sums) -> float:
        return _divide(sums["total"], sums["count"]) ** 0.5


class _OfDecisions(Metric):
    """A metric of binary decisions: counts of true and false positives and negatives."""

    def __init__(self, threshold: float, name: str) -> None:
        super().__init__(name)
        caller = f"fit.{type(self).__name__}"
        self._threshold = as_number(caller, "threshold", threshold, example=0.0)

    def sums(self, y_true: Any, y_pred: Any, weight: jax.Array) -> dict[str, jax.Array]:
        says, is_so = y_pred > self._threshold, jnp.reshape(y_true, y_pred.shape) > 0.5
        weights = weight.reshape(weight.shape + (1,) * (y_pred.ndim - 1))

        def count(chosen: jax.Array) -> jax.Array:
            return jnp.sum(jnp.where(chosen, weights, 0.0))

        return {
            "right": count(says & is_so),
            "said": count(says),
            "are": count(is_so),
        }


class Precision(_OfDecisions):
    """True positives, divided by all outputs above the threshold; 0 without any.

    Args:
        threshold: 0.0 for logits, 0.5 for probabilities.

    Example:
        >>> fit.Precision(0.5).result({"right": 1.0, "said": 4.0, "are": 2.0})
        0.25

    Source:
        `keras.metrics.Precision`.
    """

    def __init__(self, threshold: float, name: str = "precision") -> None:
        super().__init__(threshold, name)

    def result(self, sums: Sums) -> float:
        return _divide(sums["right"], sums["said"])


class Recall(_OfDecisions):
    """True positives, divided by all positive targets; 0 without any.

    Args:
        threshold: 0.0 for logits, 0.5 for probabilities.

    Example:
        >>> fit.Recall(0.5).result({"right": 1.0, "said": 4.0, "are": 2.0})
        0.5

    Source:
        `keras.metrics.Recall`.
    """

    def __init__(self, threshold: float, name: str = "recall") -> None:
        super().__init__(threshold, name)

    def result(self, sums: Sums) -> float:
        return _divide(sums["right"], sums["are"])


_BY_NAME: dict[str, Callable[[], Metric]] = {
    "accuracy": Accuracy,
    "acc": lambda: Accuracy("acc"),
    "mse": lambda: Mean(find_loss("mse"), "mse"),
    "mae": lambda: Mean(find_loss("mae"), "mae"),
    "mean_squared_error": lambda: Mean(find_loss("mse"), "mean_squared_error"),
    "mean_absolute_error": lambda: Mean(find_loss("mae"), "mean_absolute_error"),
    "root_mean_squared_error": RootMeanSquaredError,
}


def find_metrics(caller: str, name: str, metrics: Sequence[Any]) -> list[Metric]:
    """Return metrics from names, functions and metrics.

    Raises:
        ArgumentError: An unknown name, or two metrics of one name.
        ArgumentTypeError: An entry is none of the three.
    """
    found = []
    for index, entry in enumerate(metrics):
        if isinstance(entry, str):
            if entry not in _BY_NAME:
                raise ArgumentError(
                    f"{caller} was given {name}[{index}]={entry!r}.\n\n"
                    f"Metrics with a name are {', '.join(_BY_NAME)}.\n\n"
                    "Pass one of these, a function (y_true, y_pred) -> [b], or a fit.Metric."
                )
            found.append(_BY_NAME[entry]())
        elif isinstance(entry, Metric):
            found.append(entry)
        else:
            remedy = "Pass for instance 'accuracy', fit.TopKAccuracy(5), or a function."
            check_callable(caller, entry, f"{name}[{index}]", remedy)
            found.append(Mean(entry))
    names = [metric.name for metric in found]
    twice = sorted({n for n in names if names.count(n) > 1 or n == "loss"})
    if twice:
        raise ArgumentError(
            f"{caller} was given {name} with the names {names}.\n\n"
            "Each metric has its own name, and 'loss' is the loss.\n\n"
            f"Give another name to {', '.join(twice)}: fit.Mean(function, 'another name')."
        )
    return found


def _divide(total: Any, count: Any) -> float:
    return float(total) / float(count) if float(count) else 0.0


def _name_of(function: Any) -> str:
    function = getattr(function, "func", function)
    return str(getattr(function, "__name__", type(function).__name__))


def _labels_of(y_true: jax.Array, y_pred: jax.Array) -> jax.Array:
    """Return the class of each example; `[b, ...]`."""
    if y_true.ndim == y_pred.ndim and y_true.shape[-1] == 1:
        y_true = y_true[..., 0]
    if y_true.ndim == y_pred.ndim:
        return jnp.argmax(y_true, axis=-1)
    return y_true.astype(jnp.int32)


def _is_right(y_true: Any, y_pred: Any) -> jax.Array:
    if y_pred.ndim < 2 or y_pred.shape[-1] == 1:
        raise ShapeError(
            f"The metric 'accuracy' was given predictions of shape {list(y_pred.shape)}.\n\n"
            "It compares the largest output of each example, [b, class], with the target.\n\n"
            "For one output pass fit.BinaryAccuracy(0.0) for logits, or fit.BinaryAccuracy(0.5) "
            "for probabilities."
        )
    labels = _labels_of(y_true, y_pred)
    if labels.shape != y_pred.shape[:-1]:
        raise ShapeError(
            f"The metric 'accuracy' was given targets of shape {list(y_true.shape)} and predictions"
            f" of shape {list(y_pred.shape)}.\n\n"
            "Targets have the dims of the predictions without the last one, or are one-hot.\n\n"
            f"Pass targets of shape {list(y_pred.shape[:-1])}."
        )
    return jnp.argmax(y_pred, axis=-1) == labels
