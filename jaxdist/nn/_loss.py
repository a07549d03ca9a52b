"""Losses whose sum over the replicas is the loss of the global batch."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist import _replica
from jaxdist._called import called, name_call, refuse, refuse_type
from jaxdist._collectives import note_averaged
from jaxdist._validate import as_array, show
from jaxdist._values import PerReplica, widen
from jaxdist.errors import ContextError, ShapeError


@called("nn.compute_average_loss")
def compute_average_loss(
    per_example_loss: Any, sample_weight: Any = None, global_batch_size: Any = None
) -> jax.Array:
    """Return the sum of this replica's losses, divided by the global batch size.

    The sum of the results of all replicas is the mean over the global batch. So combine its
    gradients with `all_reduce("sum", grads)`. (`"mean"` would divide again.)

    Shapes:
        In: `[b, ...]` on each replica, where `b` is its number of examples. Out: a scalar.

    Cost:
        No collective.

    Args:
        per_example_loss: A loss for each example, or several (`[b, timesteps]`); dim 0 is the
            batch. Integers and booleans become the default float.
        sample_weight: A factor for each loss, along the leading dims of `per_example_loss`: `[b]`,
            `[b, 1]` or a scalar.
        global_batch_size: Number of examples on all replicas together: an integer, or an integer
            scalar computed in the step. The default is the number of replicas times `b`. This is
            wrong if replicas have different numbers of real examples (a last batch that is padded
            or uneven): then pass `all_reduce("sum", number_of_examples)`. If `b` differs between
            replicas, jaxdist issues an `UnevenMeanWarning`. Zero gives a loss of zero.

    Returns:
        The scalar, in the dtype of the loss.

    Raises:
        ShapeError: `per_example_loss` is a scalar, `sample_weight` does not fit it, or
            `global_batch_size` is not a scalar.
        ArgumentTypeError: `global_batch_size` is not an integer.
        ArgumentError: `global_batch_size` is negative. (A traced value is not checked.)
        ContextError: No `global_batch_size` in a strategy's scope or a merge function.

    Example:
        >>> strategy = MirroredStrategy(["cpu:0", "cpu:1"])
        >>> losses = PerReplica([np.array([1.0, 2.0]), np.array([3.0, 4.0])])
        >>> strategy.run(jaxdist.nn.compute_average_loss, (losses,))
        PerReplica(0.75, 1.75)

    Source:
        `tf.nn.compute_average_loss`.
    """
    loss = _as_float("per_example_loss", per_example_loss)
    if loss.ndim == 0:
        raise refuse(
            "a scalar as per_example_loss.",
            "It takes one loss for each example, [b] or [b, ...]. A mean does not show the "
            "number of examples.",
            "Leave the mean out of the loss function.",
            kind=ShapeError,
        )
    size = _resolve_global_batch_size(loss.shape[0], global_batch_size)
    if sample_weight is not None:
        loss = _apply_weights(loss, sample_weight)
    total = jnp.sum(widen(loss))
    # `jnp.where` around a division is not enough: the gradient of the branch not taken would be
    # nan. So the divisor itself is never 0.
    divisor = jnp.where(size == 0, 1, size).astype(total.dtype)
    return jnp.where(size == 0, jnp.zeros_like(total), total / divisor).astype(loss.dtype)


@called("nn.scale_regularization_loss")
def scale_regularization_loss(regularization_loss: Any) -> jax.Array:
    """Return the sum of a loss that is equal on all replicas, divided by the number of replicas.

    Then the sum of the results of all replicas contains the loss once.

    Shapes:
        In: any. Out: a scalar.

    Cost:
        No collective.

    Args:
        regularization_loss: A loss that depends on the variables but not on the batch.

    Raises:
        ContextError: In a strategy's scope or a merge function.

    Example:
        >>> strategy = MirroredStrategy(["cpu:0", "cpu:1"])
        >>> strategy.run(lambda w: jaxdist.nn.scale_regularization_loss(w * w), (3.0,))
        Array(4.5, dtype=float32)

    Source:
        `tf.nn.scale_regularization_loss`.
    """
    loss = _as_float("regularization_loss", regularization_loss)
    count = _num_replicas("Call it inside the function that you pass to strategy.run.")
    return (jnp.sum(widen(loss)) / count).astype(loss.dtype)


def _as_float(name: str, loss: Any) -> jax.Array:
    array = as_array(name, loss)
    return array if jnp.issubdtype(array.dtype, jnp.inexact) else array.astype(float)


def _num_replicas(remedy: str) -> int:
    frame = _replica.current_frame()
    if frame is None:
        return 1
    if frame.replica is None:
        raise ContextError(
            f"{name_call()} was called {frame.describe()}.\n\n"
            "It divides the loss of one replica, so it is called inside a replica.\n\n" + remedy
        )
    return frame.replica.num_replicas_in_sync


def _resolve_global_batch_size(num_local: int, given: Any) -> jax.Array:
    # With None, `note_averaged` records the size, for the warning about uneven steps.
    if given is None:
        remedy = (
            "Call it inside the function that you pass to strategy.run, or pass "
            "global_batch_size, the number of examples on all replicas."
        )
        note_averaged(num_local)
        return jnp.asarray(num_local * _num_replicas(remedy))
    if isinstance(given, PerReplica):
        raise refuse_type(
            f"global_batch_size={show(given)}.",
            "It is one number for all replicas.",
            "Pass the sum: all_reduce('sum', number_of_examples) in the step.",
        )
    size = given if isinstance(given, jax.Array) else np.asarray(given)
    if not jnp.issubdtype(size.dtype, jnp.integer):
        raise refuse_type(
            f"global_batch_size={show(given)}.",
            "It is a number of examples, an integer.",
            "Pass int(...), or sum the mask of real examples in an integer dtype.",
        )
    if size.ndim:
        raise refuse(
            f"global_batch_size of shape {list(size.shape)}.",
            "It is one number for all replicas, a scalar.",
            "Pass its sum, such as jnp.sum(global_batch_size).",
            kind=ShapeError,
        )
    if isinstance(size, jax.core.Tracer):
        return size
    # In a trace, JAX would trace a comparison of its own array.
    number = int(size)
    if number < 0:
        raise refuse(
            f"global_batch_size={number}.",
            "global_batch_size is the number of examples on all replicas, from 0 up.",
            "Pass that number, or leave global_batch_size out.",
        )
    # As a float: as an int32, a larger number would lose its upper bits.
    return jnp.asarray(float(number))


def _apply_weights(loss: jax.Array, sample_weight: Any) -> jax.Array:
    """Multiply the loss by weights along its leading dims."""
    weight = as_array("sample_weight", sample_weight)
    # TensorFlow also takes weights `[b, 1]` for losses `[b]`. Broadcasting would give `[b, b]`.
    while weight.ndim > loss.ndim and weight.shape[-1] == 1:
        weight = weight[..., 0]
    rest = loss.ndim - weight.ndim
    fits = rest >= 0 and all(
        w in (1, n) for w, n in zip(weight.shape, loss.shape[: weight.ndim], strict=True)
    )
    if not fits:
        raise refuse(
            f"per_example_loss of shape {list(loss.shape)} and sample_weight of shape "
            f"{list(np.shape(sample_weight))}.",
            "Weights cover the leading dims of the loss; each dim has the same size, or 1.",
            f"Pass one weight for each example: shape [{loss.shape[0]}].",
            kind=ShapeError,
        )
    return loss * weight.reshape(*weight.shape, *(1,) * rest).astype(loss.dtype)
