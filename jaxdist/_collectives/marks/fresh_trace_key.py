"""A key that makes JAX trace a function again.

JAX caches the jaxpr of a jitted or rematerialised function. Where the jaxpr depends on something
that JAX does not see (the rows of other replicas, the value of a variable), a number in the cache
key separates the traces.
"""

import itertools
from typing import Any

from jaxdist._contexts import TRACE_NUMBER

_numbers = itertools.count()


def fresh_trace_key() -> Any:
    """Return a context in which JAX finds no jaxpr that was traced outside of it."""
    return TRACE_NUMBER(next(_numbers))


def shared_trace_key() -> Any:
    """Return a context in which JAX finds every jaxpr traced outside of `fresh_trace_key`."""
    return TRACE_NUMBER(None)
