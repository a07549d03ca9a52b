"""Combining rows pair by pair: one order, whatever number of devices holds them."""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax.numpy as jnp

Combine: TypeAlias = Callable[[Any, Any], Any]


def in_pairs(rows: Any, combine: Combine) -> Any:
    """Combine dim 0 of an array pair by pair.

    Shapes:
        In: `[n, ...]`. Out: `[...]`. An odd one at the end waits for the next round.
    """
    while rows.shape[0] > 1:
        count = rows.shape[0]
        pairs = combine(rows[0 : count - count % 2 : 2], rows[1::2])
        rows = jnp.concatenate([pairs, rows[-1:]]) if count % 2 else pairs
    return rows[0]
