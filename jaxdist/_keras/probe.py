"""How the losses that a forward pass adds depend on the rows of a batch."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist._keras.models import name_of
from jaxdist._keras.source import keras_module
from jaxdist.errors import UnsupportedError

# What `add_loss` gets is a number: the model has to compute, to show what it is.
_ROWS = 4


def find_means(model: Any, state: Any, batch: Any, train: bool) -> tuple[bool, ...]:
    """Return for each loss that the model adds whether it is a mean over the rows, and not a sum.

    The model computes on a few rows, and on two parts of them: the sum of the parts is that of all
    rows, and so is the mean, if each part has the weight of its rows.

    Raises:
        UnsupportedError: A loss is neither.
    """
    utils = keras_module("trainers.data_adapters.data_adapter_utils")
    x, _, _ = utils.unpack_x_y_sample_weight(batch)
    trainable, fixed = jax.tree.map(np.asarray, (list(state[0]), list(state[1])))
    rows = jax.tree.map(lambda a: np.asarray(a)[:_ROWS], x)
    # A loss may be zero for the weights of now, which is both a mean and a sum. So try others.
    random = np.random.default_rng(0)
    others = [(w + random.normal(0, 0.1, w.shape)).astype(w.dtype) for w in trainable]
    # Without dropout first, whose random numbers are others for other numbers of rows.
    modes = (False, True) if train else (False,)
    tried: list[list[bool | None]] = []
    for training in modes:
        for weights in (trainable, others):
            tried.append(_compare_rows(model, weights, fixed, rows, training))
    wanted = len(tried[-1])
    kinds = [t for t in tried if len(t) == wanted and None not in t]
    if kinds:
        return tuple(bool(k) for k in kinds[0])
    unknown = [n for n, kind in enumerate(tried[-1]) if kind is None]
    raise UnsupportedError(
        f"The Keras model {name_of(model)!r} adds {wanted} loss(es) with add_loss or activity "
        f"regularizers, and number {unknown} is neither a mean nor a sum over the rows of a "
        "batch: what it is for the first rows does not follow from what it is for parts of them."
        "\n\n"
        "Each replica adds a loss of its own rows, and only means and sums can be combined.\n\n"
        "Compute the loss in compute_loss, which gets the rows of all replicas, or pass a function "
        "to compile(loss=...)."
    )


def _compare_rows(
    model: Any, trainable: Any, fixed: Any, rows: Any, training: bool
) -> list[bool | None]:
    kwargs = {"training": training} if model._call_has_training_arg else {}
    num_fixed = sum(v.regularizer is not None for v in model.trainable_variables)

    def add(x: Any) -> list[float]:
        _, _, losses = model.stateless_call(trainable, fixed, x, return_losses=True, **kwargs)
        return [float(jnp.sum(loss)) for loss in losses[: len(losses) - num_fixed]]

    size = jax.tree.leaves(rows)[0].shape[0]
    parts = [jax.tree.map(lambda a, at=at: a[at], rows) for at in (slice(0, 1), slice(1, None))]
    added = [add(x) for x in (rows, *parts)]
    both, first, rest = added
    return [_compare(*x, size) for x in zip(both, first, rest, strict=True)]


def _compare(both: float, first: float, rest: float, size: int) -> bool | None:
    """Whether a loss of `size` rows is a mean; None if it is neither a mean nor a sum."""
    is_mean = bool(np.isclose(both, (first + (size - 1) * rest) / size, rtol=1e-3))
    is_sum = bool(np.isclose(both, first + rest, rtol=1e-3))
    return None if is_mean == is_sum else is_mean
