"""Error messages for a nan or an infinity, under `jax_debug_nans` or `jax_debug_infs`."""

import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxdist._called import called, name_call
from jaxdist.errors import NotFiniteError

_SAYS_INF = re.compile(r"\(inf\)|'inf'")


@called("strategy.run")
def not_finite_error(
    error: Exception, name: str, line: str, where: str, operands: Sequence[Any]
) -> NotFiniteError:
    """Return the error for an operation whose result is not finite.

    Args:
        error: The exception of JAX.
        name: The name of the operation.
        line: The line of the step that called it.
        where: The replicas, in words.
        operands: The operands of the operation.
    """
    kind = kind_of(error)
    came_in = any(has_kind(kind, x) for x in operands)
    source = (
        " It got one as input: an argument of the step, or an array in its closure, has it."
        if came_in
        else ""
    )
    return NotFiniteError(
        f"{name_call()}: {name} at {line} returned a value that is not finite ({kind}), {where}."
        f"{source}\n\njax_debug_nans or jax_debug_infs is set, so the step was run again op by op, "
        f"to find the operation. No state was written.\n\n{remedy(name, came_in=came_in)}"
    )


def not_found_error(error: Exception, name: str, kind: str, without: str = "") -> NotFiniteError:
    """Return the error for a result that is not finite, where no operation is found that made it.

    Args:
        error: The exception of JAX.
        name: The call, with the name of the step or the function.
        kind: `step` or `function`.
        without: Why nothing was run again op by op.
    """
    why = (
        f"{without} a {kind} cannot be run op by op, which would show the line."
        if without
        else f"When the {kind} ran again op by op, no operation made one. XLA may have made it "
        f"where it combined operations, or the {kind} returns one that it was given."
    )
    return NotFiniteError(
        f"{name} returned a value that is not finite ({kind_of(error)}), and jax_debug_nans "
        f"or jax_debug_infs is set. No state was written.\n\n{why}\n\n"
        f"Look at values inside the {kind}: jax.debug.print('{{}}', x)."
    )


# Remedies by the name of the operation that makes the nan or the infinity.
_AVOIDED = {
    "div": "Keep the divisor away from 0: x / jnp.where(y == 0, 1, y).",
    "log": "Keep its argument above 0: jnp.log(jnp.maximum(x, 1e-12)).",
    "sqrt": "Keep its argument from 0 up: jnp.sqrt(jnp.maximum(x, 0)).",
    "rsqrt": "Keep its argument above 0: jax.lax.rsqrt(jnp.maximum(x, 1e-12)).",
    "exp": "Keep its argument small: jnp.exp(x - x.max()), or use jax.nn.softmax or logsumexp.",
}


def remedy(name: str, *, came_in: bool) -> str:
    """Return the remedy for an operation whose result is not finite.

    Args:
        name: The name of the operation.
        came_in: Whether one of its operands was not finite.
    """
    if came_in:
        return (
            "Look at what is passed in: jax.tree.map(lambda x: bool(jnp.isfinite(x).all()), args)."
        )
    return _AVOIDED.get(name, "Look at what the operation gets: jax.debug.print('{}', x).")


def kind_of(error: Exception) -> str:
    """Return `nan` or `inf`: the kind of number that JAX's exception is about."""
    # A `FloatingPointError` has it only in its text.
    return getattr(error, "ty", "inf" if _SAYS_INF.search(str(error)) else "nan")


def has_kind(kind: str, value: Any) -> bool:
    """Whether an array contains a nan, or an infinity."""
    if not hasattr(value, "dtype") or not jnp.issubdtype(value.dtype, jnp.inexact):
        return False
    is_kind = jnp.isnan if kind == "nan" else jnp.isinf
    # JAX must not check the results of these two operations.
    with jax.debug_nans(False), jax.debug_infs(False):
        return bool(is_kind(value).any())
