"""Turns an optimizer of Keras into an optax transformation."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

from jaxdist import _keras_servers
from jaxdist._called import refuse
from jaxdist._keras import keras_module
from jaxdist.errors import UnsupportedError


def check_optimizer(name: str, optimizer: Any) -> None:
    """Check that an optimizer of Keras is a function of its state and the gradients.

    Args:
        name: The name of the model.
        optimizer: Its optimizer.

    Raises:
        UnsupportedError: The optimizer scales the loss, or overwrites weights by their averages.
    """
    scales = isinstance(
        optimizer, keras_module("optimizers.loss_scale_optimizer").LossScaleOptimizer
    )
    if not scales and not getattr(optimizer, "use_ema", False):
        return
    what = "a LossScaleOptimizer" if scales else "an optimizer with use_ema=True"
    instead = "mixed_bfloat16, which needs no scaling" if scales else "optax.ema in an optax chain"
    raise refuse(
        f"the Keras model {name!r} with {what}.",
        "An Estimator passes gradients to the optimizer, and saves the weights that it returns.",
        f"Use {instead}, or train the model with its own fit in the strategy's scope.",
        kind=UnsupportedError,
    )


def make_transformation(optimizer: Any) -> optax.GradientTransformation:
    """Return a transformation whose updates lead to the weights that the optimizer computes.

    The optimizer must be built. The state begins with its current values.
    """

    return _keras_servers.make_transformation(
        optimizer, lambda: [jnp.array(np.asarray(v.value)) for v in optimizer.variables]
    )
