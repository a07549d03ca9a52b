"""The learning rate of an optimizer, where it is part of the state."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxdist.errors import ArgumentError

_NAME = "learning_rate"


def _find_all(state: Any) -> Iterator[dict[str, Any]]:
    """Yield all dicts of hyperparameters in the state of an optimizer."""
    hyperparams = getattr(state, "hyperparams", None)
    if hyperparams is not None and _NAME in hyperparams:
        yield hyperparams
        return
    if hasattr(state, "_fields"):
        children: Any = (getattr(state, name) for name in state._fields)
    elif isinstance(state, (tuple, list)):
        children = state
    elif isinstance(state, dict):
        children = state.values()
    else:
        return
    for child in children:
        yield from _find_all(child)


def find_rate(optimizer: "nnx.Optimizer[Any]") -> Any:
    """Return the variable with the learning rate.

    Raises:
        ArgumentError: The learning rate is no part of the optimizer's state.
    """
    found = list(_find_all(optimizer.opt_state))
    if len(found) != 1:
        raise ArgumentError(
            f"The learning rate of the optimizer cannot be read or set: its state has {len(found)} "
            "of them.\n\n"
            "optax keeps a learning rate in the state only if it is asked to; otherwise it is a "
            "constant of the compiled step.\n\n"
            "Pass an optimizer by name, such as 'adam', or "
            "optax.inject_hyperparams(optax.adam)(learning_rate=1e-3)."
        )
    return found[0][_NAME]


def get_rate(optimizer: "nnx.Optimizer[Any]") -> float:
    """Return the learning rate."""
    return float(jax.device_get(find_rate(optimizer)[...]))


def set_rate(optimizer: "nnx.Optimizer[Any]", rate: float) -> None:
    """Set the learning rate of the steps that come."""
    variable = find_rate(optimizer)
    old = variable[...]
    # The same dtype and placement, so that no step is compiled again.
    new = jnp.asarray(rate, old.dtype)
    variable.set_value(jax.device_put(new, old.sharding))
