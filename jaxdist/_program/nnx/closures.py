"""NNX objects in closures, and Flax variables in containers: assignments to them raise errors."""

import contextlib
import functools
import traceback
import types
from collections.abc import Iterator
from typing import Any

import jax
from flax import nnx
from flax.errors import TraceContextError
from jax.errors import UnexpectedTracerError
from jax.sharding import NamedSharding

from jaxdist import _compat
from jaxdist._program.arguments.arguments import argument_name
from jaxdist._program.arguments.retrace import source_location
from jaxdist._program.nnx.graph import path_suffix
from jaxdist._values import Stop, is_nnx_object, list_arrays, make_leak_error, stops
from jaxdist.errors import ArgumentTypeError, ContextError

# How deep the search follows functions that a step calls.
MAX_DEPTH = 4


def find_closure_values(fn: Any) -> dict[str, Any]:
    """Return what a function can reach besides its arguments, by the names in its code.

    This includes closures, globals and defaults, also of the functions that it reaches.
    """
    found: dict[str, Any] = {}
    _collect(fn, found, set(), MAX_DEPTH)
    return found


def _collect(fn: Any, found: dict[str, Any], seen: set[int], depth: int) -> None:
    if id(fn) in seen or not depth:
        return
    seen.add(id(fn))
    for name, value in _iterate_reachable(fn):
        if isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
            _collect(value, found, seen, depth - 1)
        else:
            found.setdefault(name, value)


def _iterate_reachable(fn: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(fn, functools.partial):
        yield "func", fn.func
        yield from ((f"args[{i}]", a) for i, a in enumerate(fn.args))
        yield from fn.keywords.items()
    elif isinstance(fn, types.MethodType):
        yield "self", fn.__self__
        yield from _iterate_reachable(fn.__func__)
    elif isinstance(fn, types.FunctionType):
        yield from iterate_cells(fn)
        for name in _iterate_global_names(fn.__code__):
            if name in fn.__globals__:
                yield name, fn.__globals__[name]
        yield from ((f"default {i}", d) for i, d in enumerate(fn.__defaults__ or ()))
        yield from (fn.__kwdefaults__ or {}).items()
    elif hasattr(fn, "__wrapped__"):
        yield "__wrapped__", fn.__wrapped__


def iterate_cells(fn: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield name and value of each variable in the closure of a function."""
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        # A variable that is not assigned yet has an empty cell.
        with contextlib.suppress(ValueError):
            yield name, cell.cell_contents


def _iterate_global_names(code: types.CodeType) -> Iterator[str]:
    """Yield the global names in a code object and in the functions defined in it."""
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _iterate_global_names(const)


# Parts of JAX's messages about an array whose layout an operation does not accept.
_OF_LAYOUTS = "should match the mesh of sharding"
# Likewise about an array whose type has Explicit axes. Some functions look at the type of an array
# of the closure before it is converted.
_OF_TYPES = (
    "Incompatible types for broadcasting",
    "Closing over inputs to shard_map",
    "0th dimension of all xs should be replicated",
    "should match the aval mesh",
    # From jaxdist: JAX took the layout of the array for one that the step requested.
    "as all replicas have together",
)


@contextlib.contextmanager
def explain_errors(fn: Any) -> Iterator[None]:
    """Raise a named error where `fn`, called in the block, cannot use what it closes over."""
    try:
        yield
    except (TraceContextError, ValueError, NotImplementedError, UnexpectedTracerError) as error:
        raise_if_leaked(fn, error)
        # JAX and Flax have no classes for these errors; their messages tell them apart.
        if _OF_LAYOUTS in str(error):
            _raise_for_global_array(fn, error)
        if any(text in str(error) for text in _OF_TYPES):
            _raise_for_global_array(fn, error, are_explicit=True)
        if "different trace level" not in str(error):
            raise
        objects = {n: v for n, v in find_closure_values(fn).items() if _holds_nnx_object(v)}
        touched = _find_refused_object(error, objects)
        if touched is None:
            # The object is in the closure of a transformation inside the step, or the search did
            # not reach it.
            error.add_note(
                "If the object was made outside the step, pass it as an argument: "
                "strategy.run(step, args=(object, ...))."
            )
            raise
        raise ContextError(_closure_message(fn, *touched, objects)) from error


def raise_if_leaked(fn: Any, error: Exception) -> None:
    """Raise a named error if the cause was a tracer of an ended trace."""
    if isinstance(error, UnexpectedTracerError) or "context mesh" in str(error):
        dead = _find_leaked_value(fn)
        if dead is not None:
            raise leak_error(fn, dead) from error


def _raise_for_global_array(fn: Any, error: Exception, *, are_explicit: bool = False) -> None:
    """Raise a named error if JAX refused a closed-over array because of its sharding."""
    for name, value in find_closure_values(fn).items():
        for array in (x for leaf in list_leaves(value) for x in list_arrays(leaf)):
            sharding = getattr(array, "sharding", None)
            if isinstance(sharding, NamedSharding) and (
                not are_explicit or sharding.mesh.explicit_axes
            ):
                shown = f"{array.dtype}{list(array.shape)} laid out as {array.sharding.spec}"
                raise ContextError(
                    f"The step at {source_location(fn)} closes over {name}, which holds an "
                    f"array {shown}. JAX refused an operation on it.\n\n"
                    "An array that a step closes over keeps its layout over the devices, and some "
                    "functions of jax.numpy, such as where, accept no array with a layout."
                    f"\n\nPass it as an argument: strategy.run(step, args=({name}, ...))."
                ) from error


def _find_leaked_value(fn: Any) -> Any:
    """Return a tracer that a function reaches and whose trace has ended, or None."""
    leaves = (x for value in find_closure_values(fn).values() for x in list_leaves(value))
    dead = (x for x in leaves if isinstance(x, jax.core.Tracer) and not _compat.is_live(x))
    return next(dead, None)


def list_leaves(value: Any) -> list[Any]:
    """List the leaves of a container that a function reaches; of another value, the value."""
    # Not `jax.tree.leaves` of the whole: a function may reach a dict whose keys have no order.
    if not isinstance(value, (dict, list, tuple)):
        return [value]
    items = value.values() if isinstance(value, dict) else value
    return [leaf for item in items for leaf in list_leaves(item)]


def leak_error(fn: Any, dead: Any) -> ContextError:
    """Return the error for a step that closes over a tracer of an ended trace."""
    reached = find_closure_values(fn).items()
    names = [name for name, value in reached if any(x is dead for x in list_leaves(value))]
    where = f" through {names[0]}" if names else ""
    return make_leak_error(f"The step at {source_location(fn)} uses{where} ", dead)


def _holds_nnx_object(value: Any) -> bool:
    """Whether a value is an NNX object, or a container with one."""
    if not isinstance(value, (dict, list, tuple)):
        return is_nnx_object(value)
    return any(map(is_nnx_object, jax.tree.leaves(value, is_leaf=is_nnx_object)))


def _find_refused_object(error: BaseException, objects: dict[str, Any]) -> tuple[str, Any] | None:
    """Return name and value of the object that Flax refused to change, if `objects` contain it."""
    known: dict[int, tuple[str, Any]] = {}
    for name, value in objects.items():
        for path, part in nnx.iter_graph(value):
            known.setdefault(id(part), (name + path_suffix(path), part))
    found = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        # Frames of the user also hold closed-over objects that are not the cause.
        if str(frame.f_globals.get("__name__", "")).startswith("flax."):
            for local in frame.f_locals.values():
                found = known.get(id(local), found)
    return found


def _closure_message(fn: Any, name: str, part: Any, objects: dict[str, Any]) -> str:
    kinds = ", ".join(f"{n} ({type(v).__name__})" for n, v in objects.items())
    arguments = ", ".join(objects)
    bare = [n for n, v in objects.items() if isinstance(v, nnx.Variable)]
    inside = (
        f" Put a variable that is in no module into one first: nnx.Dict(value={bare[0]})."
        if bare
        else ""
    )
    return (
        f"The step at {source_location(fn)} writes, or differentiates with respect to, {name}, a "
        f"{type(part).__name__}, which it closes over.\n\n"
        f"NNX objects that it closes over: {kinds}. The variables of such an object are part of "
        "the program: a step may read them, as they were when it was traced, and nothing else.\n\n"
        f"Pass the objects as arguments: strategy.run(step, args=({arguments}, ...)). Their "
        f"variables are then updated in place.{inside}"
    )


Found = list[tuple[str, nnx.Variable[Any], Any]]


def find_bare_variables(args: Any, kwargs: Any) -> Found:
    """Return name, variable and value of each variable that is in no module and no `nnx.State`."""
    leaves = jax.tree_util.tree_flatten_with_path(
        (args, kwargs), is_leaf=stops(Stop.BARE_VARIABLES)
    )[0]
    return [
        (argument_name(path), leaf, _compat.get_held(leaf))
        for path, leaf in leaves
        if isinstance(leaf, nnx.Variable)
    ]


def check_no_write_is_lost(found: Found, result: Any) -> None:
    """Raise if a step assigned such a variable and does not return the new value.

    Raises:
        ArgumentTypeError: JAX passed a copy of the variable to the step, so the caller's variable
            would not change.
    """
    written = [(n, v) for n, v, before in found if _compat.get_held(v) is not before]
    if not written:
        return
    returned = {id(x) for x in jax.tree.leaves(result)}
    for name, variable in written:
        if id(_compat.get_held(variable)) not in returned:
            kind = type(variable).__name__
            raise ArgumentTypeError(
                f"The step wrote to {name}, a {kind} in a container, and did not return it.\n\n"
                "JAX passes the value of such a variable: the step had a copy of the variable, "
                "and what it wrote would be lost.\n\n"
                "Pass the module that holds it, or nnx.Dict(value=variable); or return the value."
            )
