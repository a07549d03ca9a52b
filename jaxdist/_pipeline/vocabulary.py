"""The cross-entropy of a large vocabulary: whole, or split over the stages of a pipeline."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp

from jaxdist._called import refuse, refuse_type
from jaxdist._values import wide_dtype
from jaxdist.errors import ShapeError

_AXIS: ContextVar[str | None] = ContextVar("jaxdist_axis_of_vocabulary", default=None)


@contextlib.contextmanager
def split_over(axis: str | None) -> Iterator[None]:
    """Let `vocabulary_loss` take its matrix as one part of the words, over this axis."""
    token = _AXIS.set(axis)
    try:
        yield
    finally:
        _AXIS.reset(token)


def vocabulary_loss(h: Any, x: Any, labels: Any, weights: Any = None) -> Any:
    """Return the softmax cross-entropy of labels, for the logits `x @ h`, in float32.

    In the head of a pipeline whose matrix is split over the stages, all stages take part: each
    computes the logits of its words, and three numbers for each token are summed over the stages.

    Args:
        h: A matrix `[width, words]`; where it is split, `[width, words of this stage]`.
        x: The output of the last layer, `[..., width]`.
        labels: The numbers of the words, `[...]`. A number that is not of a word, such as -100 for
            tokens to leave out, gives nan, unless the weight of the token is 0.
        weights: A weight for each token, `[...]`, or None.

    Returns:
        The mean over all tokens; with weights, the sum of the weighted losses.
    """
    if h.ndim != 2 or x.shape[-1:] != h.shape[:1] or labels.shape != x.shape[:-1]:
        raise refuse(
            f"h {[*h.shape]}, x {[*x.shape]} and labels {[*labels.shape]}.",
            "h is [width, words], x is [..., width], and labels is [...].",
            f"Pass labels of the shape {[*x.shape[:-1]]} and a matrix of {x.shape[-1]} rows.",
            kind=ShapeError,
        )
    if weights is not None and jnp.shape(weights) != labels.shape:
        raise refuse(
            f"weights {[*jnp.shape(weights)]} for labels {[*labels.shape]}.",
            "weights has a number for each token.",
            "Broadcast them to the shape of the labels.",
            kind=ShapeError,
        )
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise refuse_type(
            f"labels of {labels.dtype}.",
            "labels are the numbers of words.",
            "Pass integers; for probabilities of all words, write the loss in the head.",
        )
    axis = _AXIS.get()
    wide = wide_dtype(jnp.result_type(x, h))
    logits = jnp.einsum("...d,dv->...v", x, h, preferred_element_type=wide)
    # The result does not depend on the largest logit, which only keeps `exp` finite.
    top = jax.lax.stop_gradient(jnp.max(logits, -1))
    first = 0
    if axis is not None:
        top = jax.lax.pmax(top, axis)
        first = jax.lax.axis_index(axis) * h.shape[1]
    words = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    is_label = words == labels[..., None] - first
    own = jnp.sum(jnp.where(is_label, logits, 0), -1)
    total = jnp.sum(jnp.exp(logits - top[..., None]), -1)
    if axis is not None:
        own, total = jax.lax.psum((own, total), axis)
    num_words = h.shape[1] * (1 if axis is None else jax.lax.axis_size(axis))
    is_word = (labels >= 0) & (labels < num_words)
    losses = jnp.where(is_word, jnp.log(total) + top - own, jnp.nan)
    if weights is None:
        return jnp.mean(losses)
    weights = jnp.asarray(weights).astype(losses.dtype)
    # Before the product, whose derivative by a weight is the loss.
    return jnp.sum(jnp.where(weights == 0, 0, losses) * weights)
