"""Finds which variables of a model belong to Keras layers, and which to layers of the user."""

import types
from typing import Any

from jaxdist._keras.source import keras_module

# Methods of a layer that do not compute its state.
_HARMLESS = frozenset({"__init__", "get_config", "from_config", "compute_output_shape"})


def find_aggregations(model: Any) -> dict[int, str]:
    """Return the aggregation of each non-trainable variable that does not belong to a Keras layer.

    Args:
        model: The model.

    Returns:
        "none", "sum", "mean" or "only_first_replica", by the number of the variable.
    """
    layers = model._flatten_layers()
    known = {id(g.state) for layer in layers for g in layer._seed_generators}
    statistics: set[int] = set()
    batch_norm = keras_module("layers.normalization.batch_normalization").BatchNormalization
    for layer in layers:
        own = [*layer._trainable_variables, *layer._non_trainable_variables]
        if _is_of_keras(type(layer)):
            known.update(id(v) for v in own)
        elif isinstance(layer, batch_norm):
            statistics.update(id(v) for v in (layer.moving_mean, layer.moving_variance))
    found: dict[int, str] = {}
    for n, variable in enumerate(model.non_trainable_variables):
        if id(variable) in known:
            continue
        aggregation = variable.aggregation or "none"
        is_moving = aggregation == "none" and id(variable) in statistics
        found[n] = "mean" if is_moving else aggregation
    return found


def _is_of_keras(kind: type) -> bool:
    """Whether a class computes the same as its base class in Keras."""
    base = next((b for b in kind.__mro__ if b.__module__.partition(".")[0] == "keras"), object)
    own = kind.__mro__[: kind.__mro__.index(base)]
    methods = {n for each in own for n, x in vars(each).items() if _is_method(x)}
    return base is not object and not any(hasattr(base, n) for n in methods - _HARMLESS)


def _is_method(value: Any) -> bool:
    return isinstance(value, (types.FunctionType, property, classmethod, staticmethod))
