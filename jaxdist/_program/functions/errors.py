"""Explains errors of compiled functions: the line of a nan or inf, and mixed devices."""

import re
from collections.abc import Callable
from typing import Any

import jax

from jaxdist import _compat
from jaxdist._program.arguments.arguments import Flat, unflatten
from jaxdist._program.functions.draws import Draws
from jaxdist._program.nnx.graph import CachedGraph
from jaxdist._program.op_by_op import has_kind, not_found_error, remedy
from jaxdist._values import Origin, PerReplica, Variable, use_binding
from jaxdist.errors import MixedStrategyError, NotFiniteError

_FOUND = re.compile(r"\((nan|inf)\) encountered in (.+)$")


def find_invalid_operation(
    fn: Callable[..., Any],
    flat: Flat,
    cached_graph: CachedGraph | None,
    draws: Draws,
    error: FloatingPointError,
) -> NotFiniteError:
    """Call the Python function op by op, and return the error with the line of the nan or inf.

    Variables, NNX objects and iterators are unchanged afterwards.
    """
    name = f"jaxdist.function ({getattr(fn, '__name__', 'function')})"
    state = cached_graph.read() if cached_graph is not None else []
    # JAX does not check operations on NumPy arrays, which NumPy computes.
    leaves = [x if isinstance(x, PerReplica) else jax.device_put(x) for x in flat.dynamic]
    args, kwargs = unflatten(flat.treedef, draws.insert_iterators(flat.slots), leaves, flat.nodes)
    # The same batches again, since the nan may depend on them.
    draws.begin_trace()
    try:
        with use_binding(_DiscardingBinding(draws)), jax.disable_jit():
            fn(*args, **kwargs)
    except NotFiniteError as found:
        return found
    except FloatingPointError as found:
        match = _FOUND.search(str(found))
        if match is not None:
            kind, operation = match.groups()
            came_in = any(has_kind(kind, leaf) for leaf in jax.tree.leaves(leaves))
            source = " An argument of the function holds one." if came_in else ""
            return NotFiniteError(
                f"{name}: {operation} at {_compat.find_line_of_error(found)} gave a value that is "
                f"not finite ({kind}).{source}\n\njax_debug_nans or jax_debug_infs is set, so the "
                "function was run again op by op, to find the operation. No state was written."
                f"\n\n{remedy(operation, came_in=came_in)}"
            )
    except Exception:  # An error that occurs only op by op is not about the nan.
        pass
    finally:
        # The function updated NNX objects in place.
        if cached_graph is not None:
            cached_graph.write(state)
    return not_found_error(error, name, "function")


class _DiscardingBinding:
    """A binding of variables and batches that discards all assignments."""

    def __init__(self, draws: Draws) -> None:
        self._draws = draws
        self._arrays: dict[int, Any] = {}

    def held(self, variable: Variable, array: Any) -> Any:
        return self._arrays.get(id(variable), array)

    def hold(self, variable: Variable, array: Any) -> None:
        self._arrays[id(variable)] = array

    def has_written(self, variable: Variable) -> bool:
        return id(variable) in self._arrays

    def origin(self, value: Any) -> Origin | None:
        return None

    def next_batch(self, feed: Any) -> Any:
        return self._draws.next_batch(feed)[2]


_ABOUT_DEVICES = "Received incompatible devices for jitted computation"
_DEVICES = re.compile(r"device ids \[([^\]]*)\] on platform (\w+)")


def mixed_devices_error(name: str, error: BaseException) -> MixedStrategyError | None:
    """Return the error for a function that JAX refused because of its devices; None for others.

    JAX refuses such a program when it lowers it. Nothing of it has run.
    """
    if not isinstance(error, ValueError) or _ABOUT_DEVICES not in str(error):
        return None
    sets = dict.fromkeys(f"{platform} {ids}" for ids, platform in _DEVICES.findall(str(error)))
    return MixedStrategyError(
        f"{name} has parts on different devices: {' and '.join(sets)}.\n\n"
        "A jaxdist.function is one program, so its steps, variables and arrays are all on the "
        "devices of one strategy.\n\n"
        "Use one strategy in it, or call one function for each strategy, and move the values "
        "between their devices with jax.device_put."
    )
