"""Turns an optimizer of Keras into an optax transformation."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax


def make_transformation(
    optimizer: Any, make_first: Callable[[], Sequence[Any]]
) -> optax.GradientTransformation:
    """Return a transformation whose updates give the weights that the optimizer computes.

    Args:
        optimizer: The optimizer, already built.
        make_first: Returns the initial values of its variables.
    """

    def init(params: Any) -> list[Any]:
        del params
        return list(make_first())

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        before, treedef = jax.tree.flatten(params)
        after, state = optimizer.stateless_apply(state, jax.tree.leaves(updates), before)
        changes = [new - old for new, old in zip(after, before, strict=True)]
        return treedef.unflatten(changes), list(state)

    return optax.GradientTransformation(init, update)
