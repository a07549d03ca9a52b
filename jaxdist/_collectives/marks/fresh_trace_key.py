"""A key that makes JAX trace a function again.

JAX caches the jaxpr of a jitted or rematerialised function. Where the jaxpr depends on something
that JAX does not see (the rows of other replicas, the value of a variable), a number in the cache
key separates the traces.
"""

import itertools
from typing import Any

import jax

# JAX makes the value of a user context part of the key of all its trace caches.
_NUMBER = jax.make_user_context(None)
_numbers = itertools.count()


def fresh_trace_key() -> Any:
    """Return a context in which JAX finds no jaxpr that was traced outside of it."""
    return _NUMBER(next(_numbers))


def shared_trace_key() -> Any:
    """Return a context in which JAX finds every jaxpr traced outside of `fresh_trace_key`."""
    return _NUMBER(None)
