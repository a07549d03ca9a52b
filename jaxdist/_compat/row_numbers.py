"""Row numbers as an array on which JAX refuses arithmetic.

Waits for a public way to make extended dtypes. The dtype is that of random keys with an
implementation of its own, which draws no numbers: JAX's transformations, sharding and control flow
accept it, and all functions that compute refuse it.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import core as _core
from jax._src import dtypes as _dtypes
from jax._src import tree_util as _tree_util
from jax._src.interpreters import mlir as _mlir
from jax._src.interpreters import pxla as _pxla
from jax._src.random import prng as _prng

# JAX's errors contain it.
ROW_NUMBERS_TAG = "row numbers of IndexedSlices"

# The modules whose compiled functions compute with all they are given.
_REFUSED = tuple(
    f"{root}.{part}" for root in ("jax", "jax._src") for part in ("numpy", "nn", "scipy")
) + ("optax.",)
_FULL = _prng.KeyTyRules.full.__code__


class _Impl(_prng.PRNGImpl):
    # Says which integers are in the words of an array.
    of: str
    refuse: Callable[[str], Exception]

    @property
    def key_shape(self) -> Any:  # type: ignore[override]
        # A fill with a number other than zero would name other rows. JAX itself fills with zeros,
        # which are only ever read beside values of zero.
        caller = sys._getframe(1)
        if caller.f_code is _FULL and not _is_zero(caller.f_locals["fill_value"]):
            raise self.refuse("A function that fills an array, such as jnp.ones_like,")
        return self[0]

    __hash__ = _prng.PRNGImpl.__hash__


def _is_zero(fill: Any) -> bool:
    if isinstance(fill, (bool, int, float, np.generic)):
        return fill == 0
    is_constant = isinstance(fill, (jax.Array, np.ndarray)) and not isinstance(fill, _core.Tracer)
    return _find_impl(fill) is not None or (is_constant and not np.any(np.asarray(fill)))


@functools.cache
def _make_impl(of: str, refuse: Callable[[str], Exception]) -> _Impl:
    def refuse_keys(*_: Any, **__: Any) -> Any:
        raise refuse("A function of jax.random")

    words = 2 if np.dtype(of).itemsize == 8 else 1
    name, tag = f"jaxdist_rows_{of}", f"{ROW_NUMBERS_TAG} ({of})"
    make: Any = _Impl
    made = make((words,), *[refuse_keys] * 4, name=name, tag=tag)
    made.of, made.refuse = of, refuse
    return made


def _find_impl(value: Any) -> _Impl | None:
    impl = getattr(getattr(value, "dtype", None), "_impl", None)
    return impl if isinstance(impl, _Impl) else None


def are_row_numbers(value: Any) -> bool:
    """Whether an array, a tracer, or the type of one holds row numbers."""
    return _find_impl(value) is not None


def wrap_row_numbers(value: Any, refuse: Callable[[str], Exception]) -> Any:
    """Return an array of integers as row numbers; everything else unchanged.

    Args:
        value: An array, a tracer, a `jax.ShapeDtypeStruct`, or anything else.
        refuse: Makes the error of an operation on the result, if it is not a tracer.
    """
    if type(value) is _prng.PRNGKeyArray and _find_impl(value) is not None:
        return RowNumbers(value._impl, value._base_array)
    if not isinstance(value, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)):
        return value
    if not jax.dtypes.issubdtype(value.dtype, np.integer):
        return value
    impl = _make_impl(jax.dtypes.canonicalize_dtype(value.dtype).name, refuse)
    if isinstance(value, jax.ShapeDtypeStruct):
        dtype: Any = _prng.KeyTy(impl)
        return jax.ShapeDtypeStruct(value.shape, dtype, sharding=value.sharding)
    if isinstance(value, _core.Tracer):
        return _prng.random_wrap(_to_words(value, impl.of), impl=impl)
    # Constants stay constants in a trace, so they raise the error there, too.
    with jax.ensure_compile_time_eval():
        return RowNumbers(impl, _to_words(jnp.asarray(value), impl.of))


def unwrap_row_numbers(value: Any) -> Any:
    """Return the integers of row numbers; everything else unchanged."""
    impl = _find_impl(value)
    if impl is None:
        return value
    if isinstance(value, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(value.shape, np.dtype(impl.of), sharding=value.sharding)
    if isinstance(value, _core.Tracer):
        return _from_words(_prng.random_unwrap(value), impl.of)
    with jax.ensure_compile_time_eval():
        return _from_words(value._base_array, impl.of)


@functools.partial(jax.jit, static_argnums=1)
def _to_words(value: Any, of: str) -> Any:
    if np.dtype(of).itemsize == 8:
        return jax.lax.bitcast_convert_type(value, jnp.uint32)
    wide = value.astype(jnp.uint32 if of.startswith("u") else jnp.int32)
    return jax.lax.bitcast_convert_type(wide, jnp.uint32)[..., None]


@functools.partial(jax.jit, static_argnums=1)
def _from_words(words: Any, of: str) -> Any:
    if np.dtype(of).itemsize == 8:
        return jax.lax.bitcast_convert_type(words, np.dtype(of))
    kind = jnp.uint32 if of.startswith("u") else jnp.int32
    return jax.lax.bitcast_convert_type(words[..., 0], kind).astype(of)


class RowNumbers(_prng.PRNGKeyArray):
    """Row numbers that are not traced. Operators and functions of `jax.numpy` raise an error."""

    _impl: Any

    def __reduce__(self) -> Any:
        return wrap_row_numbers, (np.asarray(unwrap_row_numbers(self)), self._impl.refuse)

    def __jax_array__(self) -> Any:
        """Refuse functions of `jax.numpy`."""
        raise self._impl.refuse("A function of jax.numpy")

    def __array__(self, *_: Any, **__: Any) -> Any:
        """Refuse functions of NumPy."""
        raise self._impl.refuse("A function of NumPy")


def _refuse_operator(name: str) -> Any:
    def refuse(self: RowNumbers, *_: Any, **__: Any) -> Any:
        raise self._impl.refuse(name)

    return refuse


_OPERATORS = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "divmod", "pow", "matmul"),
    *("and", "or", "xor", "lshift", "rshift"),
)
for _name in (
    *(f"__{o}__" for o in _OPERATORS),
    *(f"__r{o}__" for o in _OPERATORS),
    *("__neg__", "__pos__", "__abs__", "__invert__", "__round__", "__int__", "__float__"),
    *("__index__", "__complex__", "__lt__", "__le__", "__gt__", "__ge__", "__bool__", "astype"),
    *("sum", "mean", "max", "min", "prod", "clip", "dot", "cumsum", "sort", "argsort", "round"),
    *("std", "var", "any", "all", "item", "tolist", "view", "conj", "nonzero"),
):
    setattr(RowNumbers, _name, _refuse_operator(_name))

for _name in ("real", "imag"):
    setattr(RowNumbers, _name, property(_refuse_operator(f".{_name}")))


def _get_aval(numbers: RowNumbers) -> Any:
    # Many functions of jax.numpy are compiled programs. Inside one, a tracer raises JAX's error, so
    # they are refused when they are called.
    frame: Any = sys._getframe(1)
    for _ in range(3):
        fun = frame.f_locals.get("fun")
        module = str(getattr(fun, "__module__", ""))
        if module.startswith(_REFUSED):
            raise numbers._impl.refuse(f"{module}.{getattr(fun, '__name__', '')}")
        frame = frame.f_back
    return numbers.aval


def _lower_constant(val: Any, aval: Any) -> Any:
    words = val._base_array
    return _mlir.get_constant_handler(type(words))(words, aval)


# The tables of JAX are by exact type. With the last one, calls of a compiled function stay on JAX's
# fast path.
_core.pytype_aval_mappings[RowNumbers] = _get_aval
_dtypes.register_canonicalize_value_handler(RowNumbers, None)
_pxla.shard_arg_handlers[RowNumbers] = _pxla.shard_arg_handlers[_prng.PRNGKeyArray]
_mlir.register_constant_handler(RowNumbers, _lower_constant)
_tree_util.dispatch_registry.register_node(
    RowNumbers, _prng.prngkeyarray_flatten, _prng.prngkeyarray_unflatten
)
