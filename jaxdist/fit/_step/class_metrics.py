"""Metrics of classes."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxdist._called import called, refuse, refuse_type
from jaxdist._validate import as_integer, check_text, is_array, show
from jaxdist.errors import ShapeError
from jaxdist.fit._step.metrics import Mean

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
    return y_true.astype(jnp.int32)


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
    return jnp.argmax(y_pred, axis=-1) == labels
