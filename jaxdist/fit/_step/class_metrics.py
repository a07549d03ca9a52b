"""Metrics of classes and of binary decisions."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxdist._called import called, refuse, refuse_type
from jaxdist._validate import as_integer, as_number, check_text, is_array, show
from jaxdist.errors import ShapeError
from jaxdist.fit._step.losses import align, as_classes, check_same_shape
from jaxdist.fit._step.metrics import Mean, Metric, Sums, divide, fit_weight

_MOST_CLASSES = 2**31 - 1


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

    _aligns = False

    @called("fit.Accuracy")
    def __init__(self, name: str = "accuracy") -> None:
        check_text("name", name, "accuracy")
        super().__init__(_is_right, name)


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

    _aligns = False

    @called("fit.TopKAccuracy")
    def __init__(self, k: int, name: str | None = None) -> None:
        count = as_integer("k", k, least=1, most=_MOST_CLASSES, example=5)
        own = f"top_{count}_accuracy" if name is None else name
        check_text("name", own, f"top_{count}_accuracy")

        def is_among(y_true: Any, y_pred: Any) -> Any:
            labels = _labels_of(own, y_true, y_pred)
            is_class = (labels >= 0) & (labels < y_pred.shape[-1])
            of_label = jnp.take_along_axis(
                y_pred, jnp.where(is_class, labels, 0)[..., None], axis=-1
            )
            # Nothing is larger than nan, so a nan output would be among the largest.
            is_known = is_class & ~jnp.isnan(of_label[..., 0])
            return is_known & (jnp.sum(y_pred > of_label, axis=-1) < count)

        super().__init__(is_among, own)


@called(lambda name: f"The metric {name!r}")
def _labels_of(name: str, y_true: Any, y_pred: Any) -> jax.Array:
    """Return the class of each example; `[b, ...]`."""
    for what, value in (("targets", y_true), ("predictions", y_pred)):
        if not is_array(value):
            raise refuse_type(
                f"{what} that are {show(value)}.",
                "It compares one array of outputs with one of classes.",
                "Pass a function (y_true, y_pred) -> [b] that takes what it needs of them.",
            )
    given = y_true.shape
    if y_true.ndim == y_pred.ndim and y_true.shape[-1] == 1:
        y_true = y_true[..., 0]
    if given == y_pred.shape and y_pred.ndim > 1:
        return jnp.argmax(y_true, axis=-1)
    if y_true.shape != y_pred.shape[:-1]:
        raise refuse(
            f"targets of shape {list(given)} and predictions of shape {list(y_pred.shape)}.",
            "Targets have the dims of the predictions without the last one, or are one-hot.",
            f"Pass targets of shape {list(y_pred.shape[:-1])}.",
            kind=ShapeError,
        )
    return as_classes(y_true)


@called("The metric 'accuracy'")
def _is_right(y_true: Any, y_pred: Any) -> jax.Array:
    if is_array(y_pred) and (y_pred.ndim < 2 or y_pred.shape[-1] == 1):
        raise refuse(
            f"predictions of shape {list(y_pred.shape)}.",
            "It compares the largest output of each example, [b, class], with the target.",
            "For one output pass fit.BinaryAccuracy(0.0) for logits, or fit.BinaryAccuracy(0.5) "
            "for probabilities.",
            kind=ShapeError,
        )
    labels = _labels_of("accuracy", y_true, y_pred)
    # The largest of numbers with a nan is nan, and its index is not a class that the model chose.
    is_known = ~jnp.isnan(jnp.max(y_pred, axis=-1))
    return is_known & (jnp.argmax(y_pred, axis=-1) == labels)


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

    @called("fit.BinaryAccuracy")
    def __init__(self, threshold: float, name: str = "binary_accuracy") -> None:
        limit = as_number("threshold", threshold, example=0.0)
        check_text("name", name, "binary_accuracy")

        def is_right(y_true: Any, y_pred: Any) -> Any:
            check_same_shape(f"the metric {name!r}", y_true, y_pred)
            is_known = ~(jnp.isnan(y_pred) | jnp.isnan(y_true))
            return is_known & ((y_pred > limit) == (y_true > 0.5))

        super().__init__(is_right, name)


class _OfDecisions(Metric):
    """A metric of binary decisions: counts of true and false positives and negatives."""

    _takes_all_weights = True

    @called(lambda self: f"fit.{type(self).__name__}")
    def __init__(self, threshold: float, name: str) -> None:
        super().__init__(name)
        self._threshold = as_number("threshold", threshold, example=0.0)

    def sums(self, y_true: Any, y_pred: Any, weight: jax.Array) -> dict[str, jax.Array]:
        y_true, y_pred = align(y_true, y_pred)
        check_same_shape(f"the metric {self.name!r}", y_true, y_pred)
        says, is_so = y_pred > self._threshold, y_true > 0.5
        weights = fit_weight(self.name, says, weight)
        weights = weights.reshape(weights.shape + (1,) * (says.ndim - weights.ndim))

        def count(chosen: jax.Array) -> jax.Array:
            return jnp.sum(jnp.where(chosen, weights, 0.0))

        return {"right": count(says & is_so), "said": count(says), "are": count(is_so)}


class Precision(_OfDecisions):
    """True positives, divided by all outputs above the threshold; 0 if there are none.

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
        return divide(sums["right"], sums["said"])


class Recall(_OfDecisions):
    """True positives, divided by all positive targets; 0 if there are none.

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
        return divide(sums["right"], sums["are"])
