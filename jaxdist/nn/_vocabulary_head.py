"""`vocabulary_head`: the head of a language model, which a pipeline splits over its stages."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxdist import _pipeline
from jaxdist._called import called, refuse_type
from jaxdist._validate import check_callable, is_array, show


@dataclasses.dataclass(frozen=True)
class VocabularyHead:
    """The head that `vocabulary_head` returns."""

    labels: Callable[[Any], Any]
    weights: Callable[[Any], Any] | None
    norm: Callable[[Any, Any], Any] | None

    @called("nn.vocabulary_head")
    def __call__(self, h: Any, x: Any, rows: Any) -> jax.Array:
        """Return the loss of the rows, a scalar."""
        matrix = h
        if self.norm is not None:
            if len(jax.tree.leaves(h, is_leaf=lambda node: node is not h)) != 2:
                raise refuse_type(
                    f"h={show(h)}, and norm.",
                    "With norm, the parameters of the head are a pair: those of norm, and the "
                    "matrix.",
                    "Pass (parameters, matrix) as parts[2].",
                )
            matrix = h[1]
            x = self.norm(h[0], x)
        labels = self.labels(rows)
        weights = None if self.weights is None else self.weights(rows)
        _check_array("h", matrix, "h is one matrix, [width, words].", "Pass it as parts[2].")
        _check_array(
            "x",
            x,
            "The product takes one array, [..., width].",
            "Let norm return it: norm=lambda parameters, x: x[0].",
        )
        _check_array(
            "labels",
            labels,
            "labels(rows) returns an array of the numbers of words.",
            "Return it, such as rows['labels'].",
        )
        if weights is not None:
            _check_array(
                "weights",
                weights,
                "weights(rows) returns an array with a number for each token.",
                "Return it, such as rows['weights'].",
            )
        return _pipeline.vocabulary_loss(matrix, x, labels, weights)

    def specs(self, h: Any, axis: str) -> Any:
        """Return the layouts of the parameters over the axis of the stages."""
        if self.norm is None:
            return PartitionSpec(None, axis)
        return jax.tree.map(lambda _: PartitionSpec(), h[0]), PartitionSpec(None, axis)


def _check_array(name: str, value: Any, rule: str, remedy: str) -> None:
    if not is_array(value) or not hasattr(value, "shape"):
        raise refuse_type(f"{name}={show(value)}.", rule, remedy)


@called("nn.vocabulary_head")
def vocabulary_head(
    labels: Callable[[Any], Any],
    *,
    weights: Callable[[Any], Any] | None = None,
    norm: Callable[[Any, Any], Any] | None = None,
) -> Callable[[Any, Any, Any], jax.Array]:
    """Return the `head` of `nn.pipeline_loss` for a large vocabulary: product and cross-entropy.

    All stages compute this head together, each for its part of the words. A head of your own runs
    whole, and as stages keep the same pace, each waits for it with every micro-batch.

    Shapes:
        The head gets `h`, a matrix `[width, words]`, and `x` `[..., width]`. It returns a scalar.

    Cost:
        With S stages and M micro-batches the time of `M / S` whole heads, and for each micro-batch
        an all-reduce of `x`, of its gradient, and of three numbers for each token.

    Args:
        labels: `labels(rows)` returns the numbers of the right words, `[...]`, for the rows of a
            micro-batch. A number that is not of a word gives nan, unless its weight is 0.
        weights: `weights(rows)` returns a weight for each token. Then the loss is the sum of the
            weighted losses, and otherwise the mean over the tokens. Pass `reduce="sum"` with it.
        norm: `norm(parameters, x)` returns what the product takes. Then `h` is a pair: the
            parameters of `norm`, and the matrix.

    Raises:
        ArgumentTypeError: An argument is not callable.
        ShapeError: From the head: shapes do not fit, or the stages do not divide the words.

    Example:
        >>> head = jaxdist.nn.vocabulary_head(lambda rows: rows["labels"])
        >>> loss = head(jnp.zeros((4, 8)), jnp.ones((2, 4)), {"labels": jnp.array([1, 2])})
        >>> print(f"{loss:.4f}")
        2.0794

    Source:
        Megatron-LM, arXiv:1909.08053; vocabulary parallelism, arXiv:2411.05288.
    """
    check_callable(labels, "labels")
    if weights is not None:
        check_callable(weights, "weights")
    if norm is not None:
        check_callable(norm, "norm")
    return VocabularyHead(labels, weights, norm)
