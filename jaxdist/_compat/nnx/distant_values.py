"""NNX variables whose value is in another place: Flax sees an array where it reads one.

Note [Distant values]
A variable of Flax is a slot. An object in it that fetches its value, such as a variable on a
server, is not an array: copies of the NNX variable would share it, and functions of JAX refuse it.
So a reader of the slot gets an array that is fetched then, and a writer replaces the object.

The transformations of Flax write every variable of their arguments back, also those that did not
change. In between the value may have changed in the other place, so the object decides about such
a write, and stays in the slot.
"""

import contextlib
import functools
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

from flax import nnx
from flax.nnx import graphlib
from jax._src.array import ArrayImpl

from jaxdist._compat.tracing import set_in_block
from jaxdist.errors import JaxdistError

# What objects refused while a transformation merges; None outside of that.
_REFUSED: ContextVar[list[JaxdistError] | None] = ContextVar("jaxdist_refused", default=None)
_SHOWS_OBJECTS: ContextVar[bool] = ContextVar("jaxdist_shows_distant_objects", default=False)


def show_as_array(kind: type[Any]) -> None:
    """Let NNX variables that hold an object of a class look as if they held its value.

    Args:
        kind: A class with two methods. `lend()` fetches the value, and returns it as an array.
            `take_back(value)` takes what a transformation writes back, and raises a `JaxdistError`
            if that is not the value lent last, or if that value no longer exists.
    """
    _install()
    if kind not in _Shown.kinds:
        _Shown.kinds = (*_Shown.kinds, kind)


def get_held(variable: Any) -> Any:
    """Return what is in the slot of a variable, and fetch nothing."""
    return _SLOT.__get__(variable)


def set_held(variable: Any, value: Any) -> None:
    """Put a value into the slot of a variable, whatever was there."""
    _SLOT.__set__(variable, value)


def is_distant(value: Any) -> bool:
    """Whether a value is an object that a slot holds instead of an array."""
    return isinstance(value, _Shown.kinds)


def show_distant_objects() -> contextlib.AbstractContextManager[None]:
    """Let Flax see the objects themselves in a block."""
    return set_in_block(_SHOWS_OBJECTS, True)


def find_lent(variables: Sequence[nnx.Variable[Any]], values: Sequence[Any]) -> Sequence[Any]:
    """Return those of the variables' values that are from other places."""
    if not _Shown.kinds:
        return ()
    pairs = zip(variables, values, strict=True)
    return [value for variable, value in pairs if is_distant(get_held(variable))]


def offer_to_distant(
    variables: Sequence[nnx.Variable[Any]], values: Sequence[Any]
) -> Iterable[tuple[nnx.Variable[Any], Any]]:
    """Write values back to the objects in slots; return the other variables, with their values."""
    pairs = zip(variables, values, strict=True)
    if not _Shown.kinds:
        return pairs
    # All objects get their values before any other variable changes.
    return [pair for pair in pairs if not _write_back(*pair)]


def _write_back(variable: Any, value: Any) -> bool:
    """Offer a value to the object in the slot of a variable; return whether there was one."""
    try:
        held = _SLOT.__get__(variable)
    except AttributeError:
        # Flax is making the variable.
        return False
    if not isinstance(held, _Shown.kinds):
        return False
    held.take_back(value)
    return True


class _Shown:
    kinds: tuple[type[Any], ...] = ()


# The slot itself, which Flax reads and writes by its name.
_SLOT: Any = nnx.Variable.__dict__["_raw_value"]


def _read(variable: Any) -> Any:
    held = _SLOT.__get__(variable)
    if not isinstance(held, _Shown.kinds) or _SHOWS_OBJECTS.get():
        return held
    value = held.lend()
    # A transformation that began keeps it until it has written back.
    for begun in graphlib.GRAPH_CONTEXT.update_context_stacks.values():
        vars(begun[-1]).setdefault("lent_by_jaxdist", []).append(value)
    return value


def _write(variable: Any, value: Any) -> None:
    refused = _REFUSED.get()
    if refused is not None:
        try:
            if _write_back(variable, value):
                return
        except JaxdistError as error:
            refused.append(error)
            return
    _SLOT.__set__(variable, value)


_merge_context: Any = graphlib.merge_context


@contextlib.contextmanager
def _refuse_after_merge(*args: Any, **kwargs: Any) -> Iterator[Any]:
    """Let a transformation of Flax merge, and raise what was refused when it is done.

    Flax empties an object before it writes its variables, so an error in between would leave it so.
    """
    refused: list[JaxdistError] = []
    with _merge_context(*args, **kwargs) as merging, set_in_block(_REFUSED, refused):
        yield merging
    if refused:
        raise refused[0]


@functools.cache
def _install() -> None:
    # Flax has no hook for reads that leaves the structure of pytrees as it is.
    kind: Any = nnx.Variable
    set_value, get_attribute = kind.set_value, kind.__getattr__

    @functools.wraps(set_value)
    def set_shown(self: Any, value: Any, **index: Any) -> None:
        # `variable[...] = value` is for the object, which checks the value at once.
        if index and isinstance(_SLOT.__get__(self), _Shown.kinds):
            with show_distant_objects():
                set_value(self, value, **index)
        else:
            set_value(self, value, **index)

    @functools.wraps(get_attribute)
    def get_shown(self: Any, name: str) -> Any:
        held = _SLOT.__get__(self)
        if isinstance(held, _Shown.kinds) and name not in self._var_metadata:
            if hasattr(type(held), name) and not name.startswith("__"):
                return getattr(held, name)
            # NumPy looks for several attributes before it calls an operator.
            of_arrays = getattr(ArrayImpl, name, None)
            if of_arrays is None:
                return object.__getattribute__(self, name)
            if isinstance(of_arrays, int):
                return of_arrays
        return get_attribute(self, name)

    kind.set_value, kind.__getattr__ = set_shown, get_shown
    kind._raw_value = property(_read, _write)
    # Only transformations merge into variables that exist.
    graphlib.merge_context = _refuse_after_merge
