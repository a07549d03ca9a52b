"""Metrics of binary decisions."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxdist._called import called
from jaxdist._validate import as_number, check_text
from jaxdist.fit._step.losses import align, check_same_shape
from jaxdist.fit._step.metrics import Mean, Metric, Sums, divide, fit_weight


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
            return (y_pred > limit) == (y_true > 0.5)

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

        return {
            "right": count(says & is_so),
            "said": count(says),
            "are": count(is_so),
        }


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
