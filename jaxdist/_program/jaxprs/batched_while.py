"""While loops under `jax.vmap`: one loop for all rows, of which some end before the others.

Their condition has a row for each, and `jax.lax.while_loop` itself takes one number only.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp


def any_goes_on(condition: Any) -> Any:
    """Whether a row is left that has not ended."""
    return jnp.any(condition) if jnp.ndim(condition) else condition


def where_it_goes_on(
    condition: Any, after: Sequence[Any], before: Sequence[Any], axes: Sequence[int] | None = None
) -> list[Any]:
    """What is carried on: rows that have ended stay as they were.

    Args:
        condition: Of all rows, `[rows...]`; or of a loop without rows.
        after: What the body gives, `[rows..., ...]`.
        before: What it was given.
        axes: For each of them, the dims in front of the rows; none by default.
    """
    if not jnp.ndim(condition):
        return list(after)

    def chosen(new: Any, old: Any, front: int) -> Any:
        behind = jnp.ndim(new) - jnp.ndim(condition) - front
        shape = (1,) * front + jnp.shape(condition) + (1,) * behind
        return jnp.where(condition.reshape(shape), new, old)

    fronts = [0] * len(after) if axes is None else axes
    return [chosen(n, o, f) for n, o, f in zip(after, before, fronts, strict=True)]
