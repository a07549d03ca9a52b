"""Combining rows pair by pair, in an order that no number of devices changes."""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax.numpy as jnp

Combine: TypeAlias = Callable[[Any, Any], Any]


def combine_pairwise(rows: Any, combine: Combine) -> Any:
    """Combine dim 0 of an array pair by pair.

    Shapes:
        In: `[n, ...]`. Out: `[...]`. With odd `n`, the last row joins in the next round.
    """
    # A binary tree: with powers of two, the rows of each device are a subtree of it, so the bits of
    # the result do not depend on the number of devices. `rows.sum()` has no such order.
    while rows.shape[0] > 1:
        count = rows.shape[0]
        pairs = combine(rows[0 : count - count % 2 : 2], rows[1::2])
        rows = jnp.concatenate([pairs, rows[-1:]]) if count % 2 else pairs
    return rows[0]
