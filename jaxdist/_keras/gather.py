"""Gathers values of the global batch on every replica; each has its own share of the gradients.

The gradients of the replicas add up to the gradient of the global batch, as those of shares do.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxdist._keras.rows import Rows
from jaxdist._keras.source import keras_module


def gather_rows(value: Any, rows: Rows) -> Any:
    """Return the rows of all replicas; the gradient of a replica is that of its own rows.

    Shapes:
        In: a pytree of `[own, ...]`, with masks of Keras. Out: the same of `[total, ...]`.
    """
    return jax.tree.map(lambda leaf: _gather_leaf(leaf, rows), value)


def _gather_leaf(leaf: Any, rows: Rows) -> Any:
    @jax.custom_vjp
    def gather(array: Any) -> Any:
        return rows.gather(array)

    def forward(array: Any) -> tuple[Any, None]:
        return rows.gather(array), None

    def backward(_: None, cotangent: Any) -> tuple[Any]:
        return (rows.take_own(cotangent),)

    gather.defvjp(forward, backward)
    is_float = jnp.issubdtype(leaf.dtype, jnp.inexact)
    gathered = gather(leaf) if is_float else rows.gather(leaf)
    backend = keras_module("backend")
    mask = backend.get_keras_mask(leaf)
    if mask is not None:
        backend.set_keras_mask(gathered, rows.gather(mask))
    return gathered


def scale_gradient(value: Any, factor: float) -> Any:
    """Return a value that is equal on all replicas; its gradient is multiplied by `factor`."""

    @jax.custom_vjp
    def same(array: Any) -> Any:
        return array

    def backward(_: None, cotangent: Any) -> tuple[Any]:
        return (cotangent * jnp.asarray(factor, cotangent.dtype),)

    same.defvjp(lambda array: (array, None), backward)

    def scale(leaf: Any) -> Any:
        return same(leaf) if jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf

    return jax.tree.map(scale, value)


def add_shares(share: Any, rows: Rows) -> Any:
    """Return the sum of a share over the replicas; the gradient is that of the own share."""

    @jax.custom_vjp
    def add(array: Any) -> Any:
        return rows.add_up(array)

    add.defvjp(lambda array: (rows.add_up(array), None), lambda _, cotangent: (cotangent,))
    return add(share)
