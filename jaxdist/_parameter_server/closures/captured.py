"""NNX objects that a scheduled function uses and that are not among its arguments.

Note [Captured objects]
A trace takes the values of such an object for constants. On the servers the model is trained, and
the constants would stay as they were. So the trace is looked through for values of variables that
the function can reach; these variables move to the servers, and the function is traced again, with
the variables as inputs.
"""

import types
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxdist import _compat
from jaxdist._parameter_server.closures.adopted import adopt_one
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
