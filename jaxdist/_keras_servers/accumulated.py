"""Which variables that are not trained a Keras model computes from their own values."""

from typing import Any

import jax

from jaxdist import _compat
from jaxdist._keras import OnlyReplica, Rows, count_rows, keras_module, use_rows


def find_accumulated(
    strategy: Any, model: Any, state: Any, batch: Any, *, training: bool
) -> frozenset[int]:
    """Return the numbers of variables whose next value depends on the value before.

    A moving average is one of them, and a value that a layer only notes is none. It takes one
    trace of a call of the model, and computes nothing.

    Args:
        strategy: The strategy of the model.
        model: The model.
        state: The values of its variables: those that are trained, then the others.
        batch: A batch of Keras.
        training: Whether the model is called for training.
    """
    utils = keras_module("trainers.data_adapters.data_adapter_utils")
    x, _, _ = utils.unpack_x_y_sample_weight(batch)
    kwargs = {"training": training} if model._call_has_training_arg else {}

    def call(fixed: Any, trainable: Any, x: Any) -> list[Any]:
        _, after = model.stateless_call(trainable, fixed, x, **kwargs)
        return list(after)

    shapes = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, jax.dtypes.canonicalize_dtype(a.dtype)),
        (list(state[1]), list(state[0]), x),
    )
    count = count_rows(batch)
    with use_rows(Rows(count, count, OnlyReplica(strategy), has_shares=False)):
        closed = jax.make_jaxpr(call)(*shapes)
    numbers = range(len(state[1]))
    return frozenset(n for n in numbers if n in _compat.drop_unused(closed, [n])[1])
