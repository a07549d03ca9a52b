"""Exported programs for the tests of a server."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from jax import export


def export_bytes(
    fn: Callable[..., Any], *given: Any, platforms: tuple[str, ...] = ("cpu",)
) -> bytes:
    """Return the bytes of an exported function."""
    return bytes(export.export(jax.jit(fn), platforms=platforms)(*given).serialize())


def export_update(tx: optax.GradientTransformation, value: Any) -> tuple[bytes, list[np.ndarray]]:
    """Return an update program of optax for one array, and the first values of its slots."""
    slots, structure = jax.tree.flatten(tx.init(value))

    def update(value: Any, *rest: Any) -> tuple[Any, ...]:
        *held, grad = rest
        updates, state = tx.update(grad, jax.tree.unflatten(structure, held), value)
        return (optax.apply_updates(value, updates), *jax.tree.leaves(state))

    return export_bytes(update, value, *slots, value), [np.asarray(x) for x in slots]
