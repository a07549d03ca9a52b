"""What objects hold that JAX does not look into: arrays that would go stale, or leak."""

import collections
import dataclasses
import functools
import gc
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxdist._values import PerReplica, Sharded, Variable
from jaxdist.errors import ArgumentTypeError

# How many objects are looked at; a cycle or a large cache ends the search without a result.
_MOST = 5_000
_PLAIN = (str, bytes, bool, int, float, complex, type(None), type, types.ModuleType)
_LIBRARIES = frozenset({"jax", "jaxlib", "jaxdist", "numpy", "ml_dtypes", "optax"})


def tracer_in(value: Any) -> str | None:
    """Where in an object there is a traced value, as `.attribute[key]`; None if there is none."""
    return _search(value, lambda x: isinstance(x, jax.core.Tracer), _reached)


def array_in(value: Any) -> str | None:
    """Where in an object there is an array, as `.attribute[key]`; None if there is none.

    What functions close over is code, and a `Variable` is an input of each step that reads it, so
    neither counts.
    """
    return _search(value, _is_array, _held)


def check_step_holds_no_arrays(caller: str, fn: Any) -> None:
    """Refuse a method, or a callable object, of an object with arrays that is no pytree.

    The object is an argument that is not passed. (NNX objects have a rule of their own, and a
    `functools.partial` cannot be changed.)

    Raises:
        ArgumentTypeError: It holds arrays.
    """
    is_method = isinstance(fn, types.MethodType)
    holder = fn.__self__ if is_method else fn
    if isinstance(holder, (functools.partial, types.FunctionType, types.BuiltinFunctionType, type)):
        return
    if isinstance(holder, nnx.Pytree) or not jax.tree_util.all_leaves([holder]):
        return
    where = _search(
        holder,
        lambda x: _is_array(x) and not isinstance(x, nnx.Variable),
        lambda x: iter(()) if isinstance(x, nnx.Pytree) else _held(x),
    )
    if where is not None:
        raise ArgumentTypeError(_step_with_array(caller, fn, holder, where))


def _step_with_array(caller: str, fn: Any, holder: Any, where: str) -> str:
    kind = _kind(holder)
    is_method = isinstance(fn, types.MethodType)
    what = f"the method {fn.__name__} of a {kind}" if is_method else f"a {kind} as a function"
    call = f"object.{fn.__name__}" if is_method else "object"
    return (
        f"{caller} was given {what}, which holds arrays (object{where}) and is no pytree.\n\n"
        "The object is part of the program: the step would go on with the arrays that it has now, "
        "whatever they become.\n\n"
        f"{_remedy_for_argument(holder, kind)} If its arrays never change, say so with a function: "
        f"lambda *args: {call}(*args)."
    )


def _is_array(value: Any) -> bool:
    if isinstance(value, (Variable, np.generic)):
        return False
    if isinstance(value, (jax.Array, jax.ShapeDtypeStruct, nnx.Variable, PerReplica, Sharded)):
        return True
    if isinstance(value, np.ndarray):
        return value.dtype.kind not in "OSU"
    kind = type(value)
    return hasattr(kind, "__array__") and hasattr(kind, "shape") and hasattr(kind, "dtype")


def _search(
    value: Any,
    is_wanted: Callable[[Any], bool],
    parts_of: Callable[[Any], Iterator[tuple[str, Any]]],
) -> str | None:
    seen: set[int] = set()
    todo = collections.deque([("", value)])
    while todo and len(seen) < _MOST:
        path, found = todo.popleft()
        if id(found) in seen or isinstance(found, _PLAIN):
            continue
        seen.add(id(found))
        if is_wanted(found):
            return path
        if isinstance(found, Variable) or _is_of_a_library(found):
            continue
        todo.extend((path + step, part) for step, part in parts_of(found))
    return None


def _is_of_a_library(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] in _LIBRARIES


def _held(value: Any) -> Iterator[tuple[str, Any]]:
    """What an object holds, with a word for where."""
    if isinstance(value, Mapping):
        yield from ((f"[{k!r}]", v) for k, v in value.items())
    elif isinstance(value, (list, tuple, collections.deque)):
        yield from ((f"[{i}]", v) for i, v in enumerate(value))
    elif isinstance(value, (set, frozenset)):
        yield from (("{...}", v) for v in value)
    elif isinstance(value, BaseException):
        yield from ((f".args[{i}]", v) for i, v in enumerate(value.args))
    if isinstance(value, functools.partial):
        yield ".func", value.func
        yield from ((f".args[{i}]", v) for i, v in enumerate(value.args))
        yield from ((f".keywords[{k!r}]", v) for k, v in value.keywords.items())
    elif isinstance(value, types.MethodType):
        yield ".__self__", value.__self__
    if not isinstance(value, types.FunctionType):
        yield from ((f".{n}", v) for n, v in getattr(value, "__dict__", {}).items())
        yield from _slots(value)


def _reached(value: Any) -> Iterator[tuple[str, Any]]:
    """What an object holds, closures and iterators included."""
    yield from _held(value)
    if isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            yield from ((f", which closes over {name}", c) for c in gc.get_referents(cell))
        yield from ((", by a default", v) for v in value.__defaults__ or ())
    elif isinstance(value, types.GeneratorType):
        frame = value.gi_frame
        yield from ((f", in its {n}", v) for n, v in (frame.f_locals if frame else {}).items())
    elif isinstance(value, Iterator):
        yield from ((", in what it iterates over", v) for v in gc.get_referents(value))


def _slots(value: Any) -> Iterator[tuple[str, Any]]:
    for kind in type(value).__mro__:
        names = kind.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            try:
                yield f".{name}", getattr(value, name)
            except AttributeError:  # private, or not assigned
                continue


def with_array(caller: str, name: str, value: Any, where: str) -> str:
    """The message for an argument that holds arrays where JAX does not see them."""
    kind = _kind(value)
    place = f" ({name}{where})" if where else ""
    return (
        f"{caller} was given {name}, a {kind}, which holds arrays{place} and is no pytree.\n\n"
        "Such an object is part of the program: the step would go on with the arrays that it has "
        "now, whatever they become.\n\n"
        f"{_remedy_for_argument(value, kind)}"
    )


def _remedy_for_argument(value: Any, kind: str) -> str:
    if isinstance(value, types.MethodType):
        return "Pass the arrays as arguments, and call the method in the step."
    if isinstance(value, functools.partial):
        return (
            "Pass the arrays as arguments of their own, or use jax.tree_util.Partial, which is a "
            "pytree."
        )
    module = type(value).__module__.partition(".")[0]
    if module == "keras":
        return (
            "Pass its weights, and compute with them: state = [v.value for v in model.variables], "
            "and in the step model.stateless_call(trainable, non_trainable, x)."
        )
    if module == "torch":
        return "Convert its parameters to JAX arrays, and pass a pytree of those."
    if dataclasses.is_dataclass(value):
        return f"Register its class once: jax.tree_util.register_dataclass({kind})."
    return (
        "Pass its arrays as a pytree (a dict of them); register its class "
        f"(jax.tree_util.register_pytree_node({kind}, flatten, unflatten)); or make it an "
        "nnx.Module, which is updated in place."
    )


def with_tracer(what: str, name: str, value: Any, where: str) -> str:
    """The message for a result that holds traced values where JAX does not see them."""
    kind = _kind(value)
    return (
        f"{what} returned a {kind} as {name}, which holds a traced array: {name}{where}.\n\n"
        "JAX does not know what is in it, so the array would not come out of the program.\n\n"
        f"{_remedy_for_result(value, kind)}"
    )


def _remedy_for_result(value: Any, kind: str) -> str:
    if isinstance(value, (set, frozenset, collections.deque, Iterator)):
        return "Return a list or a tuple of the arrays."
    if isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
        return "Return the arrays, and make the function outside."
    if dataclasses.is_dataclass(value):
        return f"Register its class once: jax.tree_util.register_dataclass({kind})."
    return (
        "Return a dict of its arrays, or register its class once: "
        f"jax.tree_util.register_pytree_node({kind}, flatten, unflatten)."
    )


def _kind(value: Any) -> str:
    return type(value).__name__
