"""The error for a mutable array of JAX where a value is expected."""

from typing import Any

from jaxdist import _compat
from jaxdist.errors import ArgumentTypeError


def refuse_ref(what: str, value: Any) -> None:
    """Raise if a value is a `jax.Ref`: JAX would read it element by element, without end.

    Args:
        what: The beginning of the message: who was given what.
        value: Anything.
    """
    if _compat.is_mutable(value):
        raise ArgumentTypeError(
            f"{what}, a jax.Ref (a mutable array of jax.new_ref).\n\n"
            "An array or a number is expected, and a jax.Ref is neither: it can change.\n\n"
            "Pass its value: ref[...]. For state that steps change use jaxdist.Variable."
        )
