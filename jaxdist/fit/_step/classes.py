"""Weights each example by its class, for `class_weight`."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist._called import called, refuse, refuse_type
from jaxdist._validate import is_array, show
from jaxdist.errors import ShapeError

# Classes in ascending order, and their weights.
ClassWeights = tuple[np.ndarray, np.ndarray]


def make_class_weights(weights: Mapping[int, float]) -> ClassWeights:
    """Return classes and their weights as arrays."""
    labels = sorted(weights)
    return np.array(labels, np.int32), np.array([weights[n] for n in labels], np.float32)


@called("fit.Model")
def weigh_classes(classes: Any, y: Any, outputs: Any, weight: Any) -> jax.Array:
    """Return the weight of each example or value: that of its class, times its own.

    Shapes:
        In: `y` and `outputs` as for `_find_labels`; `weight` `[b, ...]` or None.
        Out: `[b, ...]`, with the dims of the labels or of the weights, whichever are more.

    Raises:
        ArgumentTypeError: There is more than one array of targets.
        ShapeError: The targets are not classes of these outputs, or their dims do not fit those of
            the weights.
    """
    labels = _find_labels(y, outputs).astype(jnp.int32)
    known, weights = jnp.asarray(classes[0]), jnp.asarray(classes[1])
    at = jnp.clip(jnp.searchsorted(known, labels), 0, known.size - 1)
    # A class that is not in `class_weight` has weight 1.
    found = jnp.where(known[at] == labels, weights[at], 1.0)
    if weight is None:
        return found
    weight = jnp.asarray(weight)
    most = max(found.ndim, weight.ndim)
    parts = [a.reshape(a.shape + (1,) * (most - a.ndim)) for a in (found, weight)]
    shared = min(found.ndim, weight.ndim)
    if found.shape[:shared] != weight.shape[:shared]:
        raise refuse(
            f"sample_weight of local shape {list(weight.shape)}, and class_weight with classes of "
            f"local shape {list(found.shape)}.",
            "The weight of an example is that of its class, times its own.",
            "Pass sample_weight with the dims of the classes, or [N].",
            kind=ShapeError,
        )
    return parts[0] * parts[1]


def _find_labels(y: Any, outputs: Any) -> jax.Array:
    """Return the classes of the targets.

    Shapes:
        In: `outputs` `[b, ..., class]` and `y` `[b, ...]`, `[b, ..., 1]` or one-hot; or, for a
            binary decision, both `[b]` or `[b, 1]`.
    """
    if not is_array(y):
        raise refuse_type(
            f"class_weight, and targets y that are {show(y)}.",
            "Weights of classes need one array of classes.",
            "Pass sample_weight instead.",
        )
    if y.ndim > 1 and y.shape[-1] == 1:
        return y[..., 0]
    if not is_array(outputs) or outputs.ndim == 0:
        # As in Keras, which ignores the outputs here.
        return y if y.ndim == 1 else jnp.argmax(y, axis=-1)
    if y.ndim > 1 and y.shape == outputs.shape:
        return jnp.argmax(y, axis=-1)
    if y.shape in (outputs.shape, outputs.shape[:-1]):
        return y
    raise refuse(
        f"class_weight, targets y of local shape {list(y.shape)}, and outputs of the model of "
        f"local shape {list(outputs.shape)}.",
        "Targets have the dims of the outputs without the last one, or are one-hot.",
        "Pass y as classes, or sample_weight instead of class_weight.",
        kind=ShapeError,
    )
