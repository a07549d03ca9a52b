"""A primitive for values that exist only on the servers after a closure."""

from typing import Any

import jax
from jax.extend.core import Primitive

# `updated` stands for what an optimizer on the servers adds to a parameter. No worker knows it, so
# a program that uses it cannot be compiled; a closure only returns it as the parameter's new value,
# and that result is dropped.
UPDATED = Primitive("jaxdist_updated_on_servers")
UPDATED.def_abstract_eval(lambda x, *, optimizer, leaf: x)


def mark_as_updated(value: Any, optimizer: int, leaf: int) -> jax.Array:
    """Return a value that stands for the update of one parameter.

    Args:
        value: The parameter.
        optimizer: The number of the optimizer in the closure.
        leaf: The number of the parameter in the tree that the optimizer updates.
    """
    return UPDATED.bind(value, optimizer=optimizer, leaf=leaf)
