"""Traced values that outlived their trace."""

from typing import Any

import jax

from jaxdist import _compat
from jaxdist.errors import ContextError


def is_leaked(value: Any) -> bool:
    """Whether a value is traced, and nobody traces the caller."""
    return isinstance(value, jax.core.Tracer) and not _compat.inside_trace()


def refuse_leaked(caller: str, name: object, value: Any) -> None:
    """Refuse a traced value that outlived its trace.

    Raises:
        ContextError: It is one.
    """
    if is_leaked(value):
        raise leaked(f"{caller} was given {name}, ", value)


def leaked(start: str, value: Any) -> ContextError:
    """The error for a traced value that outlived its trace."""
    return ContextError(
        f"{start}a traced value ({value.aval.str_short()}) of a function that JAX has finished "
        "tracing.\n\n"
        "A step, or a function under jax.jit, kept it in a list, an attribute or a global. It has "
        "a number only while the compiled function runs.\n\n"
        "Return the value from that function, and use what it returns."
    )
