"""Reads and sets the learning rate of an optimizer, if it is in the state."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxdist._called import refuse
from jaxdist.errors import ArgumentError

_NAME = "learning_rate"


def _find_all(state: Any) -> Iterator[Any]:
    """Yield all parts of the state of an optimizer that have a learning rate."""
    hyperparams = getattr(state, "hyperparams", None)
    if hyperparams is not None and _NAME in hyperparams:
        yield state
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


def _find(optimizer: "nnx.Optimizer[Any]") -> Any:
    """Return the part of the state with the learning rate.

    Raises:
        ArgumentError: The learning rate is not in the optimizer's state.
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
    return found[0]


def get_rate(optimizer: "nnx.Optimizer[Any]") -> float:
    """Return the learning rate."""
    return float(jax.device_get(_find(optimizer).hyperparams[_NAME][...]))


def set_rate(optimizer: "nnx.Optimizer[Any]", rate: float) -> None:
    """Set the learning rate of the next steps.

    Raises:
        ArgumentError: The learning rate is not in the optimizer's state, or a schedule sets it.
    """
    state = _find(optimizer)
    if _NAME in getattr(state, "hyperparams_states", {}):
        raise refuse(
            f"learning_rate={rate}, and a schedule of optax sets it.",
            "A schedule computes the learning rate in each step, so this one would not be used.",
            "Give the optimizer a number: "
            "optax.inject_hyperparams(optax.adam)(learning_rate=1e-3).",
        )
    variable = state.hyperparams[_NAME]
    old = variable[...]
    # Keep the dtype and placement, so that no step is compiled again.
    new = jnp.asarray(rate, old.dtype)
    variable.set_value(jax.device_put(new, old.sharding))
