"""Making JAX trace a function again that it has traced before.

JAX keeps what a jitted or rematerialised function was traced to. Where that depends on something
that JAX does not see (the rows of other replicas, the value of a variable), a number that is part
of the key makes the difference.
"""

import itertools
from typing import Any

import jax

_NUMBER = jax.make_user_context(None)
_numbers = itertools.count()


def fresh_trace_key() -> Any:
    """A context in which nothing is found that was traced outside of it."""
    return _NUMBER(next(_numbers))


def traced_once() -> Any:
    """A context in which everything is found that was traced outside of `fresh_trace_key`."""
    return _NUMBER(None)
