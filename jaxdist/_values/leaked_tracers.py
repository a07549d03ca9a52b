"""Tracers that outlived their trace."""

from typing import Any

import jax

from jaxdist import _compat
from jaxdist.errors import ContextError


def is_leaked(value: Any) -> bool:
    """Whether `value` is a tracer although the caller is not being traced."""
    return isinstance(value, jax.core.Tracer) and not _compat.inside_trace()


def refuse_leaked(caller: str, name: object, value: Any) -> None:
    """Raise if `value` is a tracer that outlived its trace.

    Raises:
        ContextError: `value` is such a tracer.
    """
    if is_leaked(value):
        raise leaked(f"{caller} was given {name}, ", value)


def leaked(start: str, value: Any) -> ContextError:
    """Return the error for a tracer that outlived its trace; the text begins with `start`."""
    return ContextError(
        f"{start}a traced value ({value.aval.str_short()}) of a function that JAX has finished "
        "tracing.\n\n"
        "A step, or a function under jax.jit, kept it in a list, an attribute or a global. It has "
        "a number only while the compiled function runs.\n\n"
        "Return the value from that function, and use what it returns."
    )
