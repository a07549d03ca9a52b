"""While loops under `jax.vmap`: one loop for all rows, some of which finish early.

The condition has one value for each row, but `jax.lax.while_loop` accepts a scalar only.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp


def run_while(
    condition: Callable[[list[Any]], Any],
    body: Callable[[list[Any]], list[Any]],
    start: list[Any],
    *,
    is_batched: bool,
    axes: Sequence[int] | None = None,
) -> list[Any]:
    """Return the last state of a loop, whose rows finish independently of each other.

    Args:
        condition: Returns for a state whether a row continues, `[rows...]`; or a scalar.
        body: Returns the next state of all rows.
        start: The first state.
        is_batched: Whether the condition has rows.
        axes: As for `keep_finished_rows`.
    """

    def run_body(state: list[Any]) -> list[Any]:
        after = body(state)
        return keep_finished_rows(condition(state), after, state, axes) if is_batched else after

    def has_active_row(state: list[Any]) -> Any:
        return jnp.any(condition(state)) if is_batched else condition(state)

    return jax.lax.while_loop(has_active_row, run_body, start)


def keep_finished_rows(
    condition: Any, after: Sequence[Any], before: Sequence[Any], axes: Sequence[int] | None = None
) -> list[Any]:
    """Return the next state, in which rows that have finished keep their values.

    Args:
        condition: The condition of all rows, `[rows...]`; or a scalar.
        after: The results of the body, `[rows..., ...]`.
        before: The state before the body.
        axes: For each value, the number of dims before those of the rows; 0 by default.
    """
    if not jnp.ndim(condition):
        return list(after)

    def select(new: Any, old: Any, front: int) -> Any:
        behind = jnp.ndim(new) - jnp.ndim(condition) - front
        shape = (1,) * front + jnp.shape(condition) + (1,) * behind
        return jnp.where(condition.reshape(shape), new, old)

    fronts = [0] * len(after) if axes is None else axes
    return [select(n, o, f) for n, o, f in zip(after, before, fronts, strict=True)]
