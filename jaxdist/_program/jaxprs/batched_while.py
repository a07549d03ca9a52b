"""While loops under `jax.vmap`: one loop for all rows, of which some finish before the others.

The condition has one value for each row, but `jax.lax.while_loop` accepts a scalar only.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp


def has_active_row(condition: Any) -> Any:
    """Whether any row has not finished."""
    return jnp.any(condition) if jnp.ndim(condition) else condition


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
