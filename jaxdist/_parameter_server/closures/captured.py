"""NNX objects that a scheduled function uses and that are not among its arguments.

Note [Captured objects]
A trace takes the values of such an object for constants. On the servers the model is trained, and
the constants would stay as they were. So the trace is looked through for values of variables that
the function can reach; these variables move to the servers, and the function is traced again, with
the variables as inputs.

Note [Captured constants]
A captured array moves to the servers (Note [Captured objects]). A number, a text or a random key
does not: the function may branch on a number, and servers hold no keys. So these are constants of
the program, and a function that has other ones when it is scheduled again is traced again.
"""

import types
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxdist import _compat
from jaxdist._parameter_server.closures.adopted import adopt_one
from jaxdist._parameter_server.closures.inputs import is_key
from jaxdist._parameter_server.variables.server_variable import ServerVariable
from jaxdist._program import find_closure_values, iterate_constants
from jaxdist.errors import ContextError

MAX_DEPTH = 5
# Objects of these packages hold no model of the user.
_CLOSED = frozenset({"builtins", "jax", "jaxlib", "jaxdist", "numpy", "optax"})


def adopt_captured(fn: Any, closed: Any, strategy: Any) -> bool:
    """Move the variables that a trace took for constants to the servers.

    Args:
        fn: The function that was traced.
        closed: The trace.
        strategy: The strategy of the servers.

    Returns:
        Whether there were any: the function has to be traced again.

    Raises:
        ContextError: One belongs to the state of an optimizer.
        UnsupportedError: One holds several arrays.
    """
    constants = {id(x) for x in iterate_constants(closed) if isinstance(x, jax.Array | np.ndarray)}
    if not constants:
        return False
    is_found = False
    for name, variable in find_variables(fn):
        held = _compat.get_held(variable)
        if isinstance(held, ServerVariable):
            continue
        found = [x for x in jax.tree.leaves(held) if id(x) in constants]
        if all(jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) for x in found):
            continue
        if isinstance(variable, nnx.OptState):
            raise ContextError(
                f"{getattr(fn, '__name__', 'function')} reads {name} of an optimizer that it "
                "closes over.\n\n"
                "The servers hold the state of an optimizer, and no worker has it.\n\n"
                "Pass the model and the optimizer as arguments, and call optimizer.update."
            )
        adopt_one(variable, name, strategy, is_state=False)
        is_found = True
    return is_found


def find_moved(fn: Any) -> list[Any]:
    """Return the NNX variables on the servers that a function can reach."""
    return [v for _, v in find_variables(fn) if isinstance(_compat.get_held(v), ServerVariable)]


def find_variables(fn: Any) -> Iterator[tuple[str, Any]]:
    """Return name and variable for each NNX variable that a function can reach."""
    seen: set[int] = set()
    for name, value in find_closure_values(fn).items():
        yield from _walk(name, value, seen, MAX_DEPTH)


def _walk(name: str, value: Any, seen: set[int], depth: int) -> Iterator[tuple[str, Any]]:
    if id(value) in seen or not depth:
        return
    seen.add(id(value))
    if isinstance(value, nnx.Variable):
        yield name, value
    elif isinstance(value, nnx.Pytree):
        for path, part in nnx.iter_graph(value):
            if isinstance(part, nnx.Variable):
                yield ".".join([name, *map(str, path)]), part
    else:
        for key, item in _list_children(value):
            yield from _walk(f"{name}.{key}", item, seen, depth - 1)


def _list_children(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(enumerate(value))
    if hasattr(value, "__wrapped__"):
        return list(find_closure_values(value.__wrapped__).items())
    if isinstance(value, (types.FunctionType, types.MethodType)):
        return list(find_closure_values(value).items())
    if isinstance(value, (type, types.ModuleType)):
        return []
    package = type(value).__module__.partition(".")[0]
    return [] if package in _CLOSED else list(getattr(value, "__dict__", {}).items())


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
