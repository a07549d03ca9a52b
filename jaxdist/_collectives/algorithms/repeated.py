"""A loop over the steps of an algorithm."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax

T = TypeVar("T")

# More steps than these become a loop. An unrolled ring over a pod would take minutes to compile.
WRITTEN_OUT = 64


def repeated(count: int, step: Callable[[Any, T], T], state: T) -> T:
    """Return the state after `step(i, state)` for i = 0 .. count - 1."""
    if count > WRITTEN_OUT:
        return jax.lax.fori_loop(0, count, step, state)
    for i in range(count):
        state = step(i, state)
    return state
