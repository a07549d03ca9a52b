"""Searches objects that are not pytrees for arrays and tracers."""

import collections
import dataclasses
import functools
import gc
import types
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, ValuesView
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxdist._called import refuse_type
from jaxdist._values import Assignable, PerReplica, Sharded
from jaxdist.errors import ArgumentTypeError

# The search visits at most this many objects, so it may miss arrays deep in a large cache.
_MOST = 5_000
_PLAIN = (str, bytes, bool, int, float, complex, type(None), type, types.ModuleType)
_VIEWS = (KeysView, ValuesView, ItemsView)
# Iterators, and views of a dict: JAX warns where these are leaves.
ITERABLE_LEAVES = (Iterator, *_VIEWS)
_LIBRARIES = frozenset({"jax", "jaxlib", "jaxdist", "numpy", "ml_dtypes", "optax"})


def find_tracer(value: Any) -> str | None:
    """Return the path of a tracer inside an object, as `.attribute[key]`, or None."""
    return _find_path(value, lambda x: isinstance(x, jax.core.Tracer), _iterate_reachable_parts)


def find_array(value: Any) -> str | None:
    """Return the path of an array inside an object, as `.attribute[key]`, or None.

    The search skips closures of functions, which are code, and `Variable`s, which are inputs of
    each step that reads them.
    """
    return _find_path(value, _is_array, _iterate_parts)


def ends_after_one_reading(value: Any) -> bool:
    """Whether a value is a generator, or an iterator of Python such as `map` and `zip`."""
    # Iterators of datasets are objects that a program may return.
    of_python = type(value).__module__ in ("builtins", "itertools")
    return of_python and isinstance(value, Iterator)


def check_step_holds_no_arrays(fn: Any) -> None:
    """Raise if the step is a method of an object with arrays, or is itself such an object.

    The object is not passed as an argument, so its arrays would become constants. Two kinds of
    steps are accepted: NNX objects have a check of their own, and a `functools.partial` cannot be
    changed.

    Raises:
        ArgumentTypeError: The object holds arrays and is not a pytree.
    """
    is_method = isinstance(fn, types.MethodType)
    holder = fn.__self__ if is_method else fn
    if isinstance(holder, (functools.partial, types.FunctionType, types.BuiltinFunctionType, type)):
        return
    if isinstance(holder, nnx.Pytree) or not jax.tree_util.all_leaves([holder]):
        return
    where = _find_path(
        holder,
        lambda x: _is_array(x) and not isinstance(x, nnx.Variable),
        lambda x: iter(()) if isinstance(x, nnx.Pytree) else _iterate_parts(x),
    )
    if where is None:
        return
    kind = type(holder).__name__
    what = f"the method {fn.__name__} of a {kind}" if is_method else f"a {kind} as a function"
    call = f"object.{fn.__name__}" if is_method else "object"
    raise refuse_type(
        f"{what}, which holds arrays (object{where}) and is not a pytree.",
        "The object is part of the program: the step would keep using the arrays that it has now, "
        "even if they change.",
        f"{_remedy_for_argument(holder, kind)} If its arrays never change, pass a function: "
        f"lambda *args: {call}(*args).",
    )


def _is_array(value: Any) -> bool:
    # A NumPy scalar cannot change, so a constant of it stays correct.
    if isinstance(value, (Assignable, np.generic)) or _is_lifted(value):
        return False
    if isinstance(value, (jax.Array, jax.ShapeDtypeStruct, nnx.Variable, PerReplica, Sharded)):
        return True
    if isinstance(value, np.ndarray):
        return value.dtype.kind not in "OSU"
    # Arrays of other libraries count too, such as tensors of PyTorch and variables of Keras.
    kind = type(value)
    return hasattr(kind, "__array__") and hasattr(kind, "shape") and hasattr(kind, "dtype")


def _find_path(
    value: Any,
    is_wanted: Callable[[Any], bool],
    parts_of: Callable[[Any], Iterator[tuple[str, Any]]],
) -> str | None:
    seen: set[int] = set()
    # Breadth first: the error shows a shortest path to the array.
    todo = collections.deque([("", value)])
    while todo and len(seen) < _MOST:
        path, found = todo.popleft()
        if id(found) in seen or isinstance(found, _PLAIN):
            continue
        seen.add(id(found))
        if is_wanted(found):
            return path
        # Objects of these libraries hold caches with arrays that have nothing to do with the step.
        of_library = type(found).__module__.partition(".")[0] in _LIBRARIES
        if isinstance(found, Assignable) or _is_lifted(found) or of_library:
            continue
        todo.extend((path + step, part) for step, part in parts_of(found))
    return None


def _is_lifted(value: Any) -> bool:
    # `_keras` marks the classes of Keras whose variables a step reads and assigns.
    return bool(getattr(type(value), "_jaxdist_is_lifted", False))


def _iterate_parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of an object, with the path of each."""
    if isinstance(value, Mapping):
        yield from ((f"[{k!r}]", v) for k, v in value.items())
    elif isinstance(value, (list, tuple, collections.deque, *_VIEWS)):
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
        yield from _iterate_slots(value)


def _iterate_reachable_parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of an object, including closures and iterators, with the path of each."""
    yield from _iterate_parts(value)
    if isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            # The referents of a cell: `cell_contents` raises if the cell is empty.
            yield from ((f", which closes over {name}", c) for c in gc.get_referents(cell))
        yield from ((", by a default", v) for v in value.__defaults__ or ())
    elif isinstance(value, types.GeneratorType):
        frame = value.gi_frame
        yield from ((f", in its {n}", v) for n, v in (frame.f_locals if frame else {}).items())
    elif isinstance(value, Iterator):
        yield from ((", in what it iterates over", v) for v in gc.get_referents(value))


def _iterate_slots(value: Any) -> Iterator[tuple[str, Any]]:
    for kind in type(value).__mro__:
        names = kind.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            try:
                yield f".{name}", getattr(value, name)
            except AttributeError:  # private, or not assigned
                continue


def hidden_array_error(name: str, value: Any, where: str) -> ArgumentTypeError:
    """Return the error for an argument that is not a pytree and holds arrays."""
    kind = type(value).__name__
    place = f" ({name}{where})" if where else ""
    return refuse_type(
        f"{name}, a {kind}, which holds arrays{place} and is not a pytree.",
        "Such an object is part of the program: the step would keep using the arrays that it has "
        "now, even if they change.",
        _remedy_for_argument(value, kind),
    )


def _remedy_for_argument(value: Any, kind: str) -> str:
    if isinstance(value, types.MethodType):
        return "Pass the arrays as arguments, and call the method in the step."
    if isinstance(value, functools.partial):
        return (
            "Pass the arrays as separate arguments, or use jax.tree_util.Partial, which is a "
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


def hidden_tracer_message(what: str, name: str, value: Any, where: str) -> str:
    """Return the message for a result that is not a pytree and holds tracers."""
    kind = type(value).__name__
    return (
        f"{what} returned a {kind} as {name}, which holds a traced array: {name}{where}.\n\n"
        "JAX cannot see inside it, so the program would not return the array.\n\n"
        f"{_remedy_for_result(value, kind)}"
    )


def _remedy_for_result(value: Any, kind: str) -> str:
    if isinstance(value, (set, frozenset, collections.deque, Iterator, *_VIEWS)):
        return "Return a list or a tuple of the arrays."
    if isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
        return "Return the arrays, and make the function outside."
    if dataclasses.is_dataclass(value):
        return f"Register its class once: jax.tree_util.register_dataclass({kind})."
    return (
        "Return a dict of its arrays, or register its class once: "
        f"jax.tree_util.register_pytree_node({kind}, flatten, unflatten)."
    )
