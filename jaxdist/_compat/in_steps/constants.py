"""Checks arrays that JAX turns into constants while jaxdist traces or runs a function.

# Note [Constants of 64 bits]
Without `jax_enable_x64`, JAX truncates the integers of a NumPy array that a step closes over or
passes to a function of JAX; see Note [Integers of 64 bits]. Afterwards the constant holds 32 bits,
and nothing shows what it was. So the check is where JAX converts. Nearly all conversions pass
`dtypes.canonicalize_value`. `lax._convert_element_type` and `jnp.array` convert with NumPy before.
What the function of a callback returns is converted while the program runs, so the callback that
is traced checks it.

JAX also refuses arrays on a mesh with Explicit axes that a step closes over. They pass the same
place, so a step gives a `view` of them there; see Note [Explicit axes].

The functions are replaced only while a thread is inside `check_constants`, and check only in that
thread. Compiled programs, and code outside of jaxdist's traces, run JAX as it is.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import api as _api
from jax._src import callback as _callback
from jax._src import dtypes as _dtypes
from jax._src import pjit as _pjit
from jax._src.lax import lax as _lax
from jax._src.numpy import array_constructors as _array_constructors
from jax._src.random import prng as _prng

from jaxdist._called import called
from jaxdist._compat.sources import find_callers_line
from jaxdist._contexts import CHECKS_CONSTANTS
from jaxdist._integers import check_fits, find_cut_off
from jaxdist.errors import ArgumentError

_NUMPY = (np.ndarray, np.generic)


class _OfThread(threading.local):
    is_checking = False
    view: Callable[[Any], Any] | None = None


_here = _OfThread()


def _check(value: Any, kept: Any) -> None:
    """Raise if JAX would truncate integers of a NumPy array; `kept` is the dtype it gets."""
    found = find_cut_off(np.asarray(value))
    if found is None:
        return
    if kept is not None and _holds(np.dtype(kept), found.low, found.high):
        return
    what = (
        f"an array of NumPy of shape {np.shape(value)}" if _is_numpy(value) else "a Python integer"
    )
    raise ArgumentError(f"At {find_callers_line()}, JAX was given {what}, {found.explain()}")


def _is_numpy(value: Any) -> bool:
    return isinstance(value, _NUMPY)


def _holds(kept: np.dtype[Any], low: int, high: int) -> bool:
    """Whether integers from `low` to `high` convert to this dtype without truncation."""
    if kept.kind not in "iu":
        return True
    # A conversion to uint32 is often meant for negative integers, too: their bits are kept.
    return kept == np.uint32 and low >= -(1 << 31) and high < 1 << 32


def _canonicalize(original: Callable[..., Any]) -> Callable[..., Any]:
    def canonicalize_value(x: Any) -> Any:
        if _here.is_checking:
            if _is_numpy(x):
                _check(x, None)
            elif _here.view is not None:
                x = _here.view(x)
        return original(x)

    return canonicalize_value


def _keep_views(view: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function that gives one view of each array, so that it stays one constant."""
    # By the id of the array. The array is kept too, so that its id stays taken.
    known: dict[int, tuple[Any, Any]] = {}

    def find_view(value: Any) -> Any:
        if not isinstance(value, jax.Array) or isinstance(value, jax.core.Tracer):
            return value
        if id(value) not in known:
            known[id(value)] = value, view(value)
        return known[id(value)][1]

    return find_view


def _convert(original: Callable[..., Any]) -> Callable[..., Any]:
    def convert_element_type(operand: Any, new_dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if _here.is_checking and isinstance(operand, (*_NUMPY, int)):
            _check(operand, new_dtype)
        return original(operand, new_dtype, *args, **kwargs)

    return convert_element_type


def _infer(original: Callable[..., Any]) -> Callable[..., Any]:
    """A jitted function takes the types of its arguments before they are converted."""

    def infer_params(fun: Any, info: Any, args: Any, kwargs: Any) -> Any:
        view = _here.view if _here.is_checking else None
        if view is not None:
            leaves, treedef = jax.tree.flatten((args, kwargs))
            seen = [*map(view, leaves)]
            if any(a is not b for a, b in zip(leaves, seen, strict=True)):
                args, kwargs = treedef.unflatten(seen)
        return original(fun, info, args, kwargs)

    return infer_params


def _make_array(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def array(object: Any, *args: Any, **kwargs: Any) -> Any:
        made = original(object, *args, **kwargs)
        if _here.is_checking and not isinstance(object, jax.Array):
            for leaf in filter(_is_numpy, jax.tree.leaves(object)):
                _check(leaf, made.dtype)
        return made

    return array


def _seed(original: Callable[..., Any]) -> Callable[..., Any]:
    """A seed may be any hash: JAX takes the lower bits on purpose."""

    def random_seed(*args: Any, **kwargs: Any) -> Any:
        was, _here.is_checking = _here.is_checking, False
        try:
            return original(*args, **kwargs)
        finally:
            _here.is_checking = was

    return random_seed


class _CheckedCallback(_callback._FlatCallback):
    """The function of a `pure_callback` or `io_callback`; it runs outside of the trace."""

    @called("jax.pure_callback or io_callback")
    def __call__(self, *flat_args: Any) -> Any:
        results = super().__call__(*flat_args)
        for result in results:
            check_fits("what its function returned", result)
        return results


# Where JAX looks each function up when it calls it.
_REPLACED: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (_dtypes, "canonicalize_value", _canonicalize),
    (_api, "canonicalize_value", _canonicalize),
    (_lax, "_convert_element_type", _convert),
    (_pjit, "_infer_params", _infer),
    (_array_constructors, "array", _make_array),
    (jnp, "array", _make_array),
    (_prng, "random_seed", _seed),
    (_callback, "_FlatCallback", lambda _: _CheckedCallback),
)


class _Replacements:
    """The functions of JAX that are replaced while at least one thread checks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads = 0
        self._originals: list[Any] = []

    def enter(self) -> None:
        with self._lock:
            self._threads += 1
            if self._threads == 1:
                self._originals = [getattr(module, name) for module, name, _ in _REPLACED]
                for (module, name, make), original in zip(_REPLACED, self._originals, strict=True):
                    setattr(module, name, make(original))

    def leave(self) -> None:
        with self._lock:
            self._threads -= 1
            if self._threads == 0:
                for (module, name, _), original in zip(_REPLACED, self._originals, strict=True):
                    setattr(module, name, original)


_replacements = _Replacements()


@contextlib.contextmanager
def check_constants(
    *, traces_anew: bool = False, view: Callable[[Any], Any] | None = None
) -> Iterator[None]:
    """Raise in the block where JAX would truncate integers of a NumPy array.

    Waits for JAX to refuse such integers itself.

    Args:
        traces_anew: Whether JAX traces functions again that it has traced outside of such blocks;
            their constants are already truncated. In a `shard_map` over other axes it always does.
        view: Returns the array that JAX uses instead of one that the function closes over.

    Raises:
        ArgumentError: JAX would truncate integers; see Note [Constants of 64 bits].
    """
    around = _here.is_checking, _here.view
    if not _here.is_checking:
        _replacements.enter()
    _here.is_checking = True
    _here.view = around[1] if view is None else _keep_views(view)
    try:
        with CHECKS_CONSTANTS(True) if traces_anew and not around[0] else contextlib.nullcontext():
            yield
    finally:
        _here.is_checking, _here.view = around
        if not around[0]:
            _replacements.leave()
