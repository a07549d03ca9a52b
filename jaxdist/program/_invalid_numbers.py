"""What is said of a nan or an infinity, where JAX is told to look for them."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp


def invalid_number(
    error: Exception, name: str, line: str, where: str, operands: Sequence[Any]
) -> str:
    """The message for an operation whose result is not finite.

    Args:
        error: What JAX raised.
        name: Of the operation.
        line: Of the step, that asked for it.
        where: On which replicas.
        operands: What it was given.
    """
    # What JAX raises has the kind of number and not more.
    kind = getattr(error, "ty", "inf" if "(inf)" in str(error) else "nan")
    came_in = any(_has(kind, x) for x in operands)
    source = (
        " It was given one: an argument of the step, or an array that it closes over, holds it."
        if came_in
        else ""
    )
    return (
        f"strategy.run: {name} at {line} gave a value that is not finite ({kind}), {where}."
        f"{source}\n\njax_debug_nans or jax_debug_infs is set, so the step was run again op by op, "
        "to find the operation. No state was written."
    )


def _has(kind: str, value: Any) -> bool:
    if not hasattr(value, "dtype") or not jnp.issubdtype(value.dtype, jnp.inexact):
        return False
    is_kind = jnp.isnan if kind == "nan" else jnp.isinf
    return bool(is_kind(value).any())
