"""Values of captured NNX variables that are constants of a trace.

Note [Captured constants]
A captured array moves to the servers (Note [Captured objects]). A number, a text or a random key
does not: the function may branch on a number, and servers hold no keys. So these are constants of
the program, and a function that has other ones when it is scheduled again is traced again.
"""

from typing import Any

import jax
import numpy as np

from jaxdist import _compat
from jaxdist._parameter_server.closures.captured import find_variables
from jaxdist._parameter_server.closures.inputs import is_key
from jaxdist._parameter_server.variables.server_variable import ServerVariable


class CapturedConstants:
    """The constants that a function had when it was traced.

    Args:
        fn: The function.
    """

    def __init__(self, fn: Any) -> None:
        self._seen = [
            (variable, held)
            for _, variable in find_variables(fn)
            if _has_constants(held := _compat.get_held(variable))
        ]

    def are_current(self) -> bool:
        """Whether the variables still have these values."""
        return all(_is_same(_compat.get_held(v), before) for v, before in self._seen)


def _has_constants(held: Any) -> bool:
    if isinstance(held, ServerVariable):
        return False
    leaves = jax.tree.leaves(held)
    return any(not isinstance(x, jax.Array | np.ndarray) or is_key(x) for x in leaves)


def _is_same(held: Any, before: Any) -> bool:
    if held is before:
        return True
    if isinstance(held, ServerVariable):
        return False
    leaves, structure = jax.tree.flatten(held)
    known, structure_before = jax.tree.flatten(before)
    return structure == structure_before and all(map(_is_same_leaf, leaves, known))


def _is_same_leaf(leaf: Any, before: Any) -> bool:
    if leaf is before:
        return True
    # The text tells 0.0 from -0.0. Other objects may compare as they like.
    is_plain = isinstance(leaf, bool | int | float | complex | str | bytes | np.generic)
    return is_plain and type(leaf) is type(before) and repr(leaf) == repr(before)
