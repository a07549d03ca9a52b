"""Makes keys of static values: two keys are equal if the values have the same types and bits.

# Note [Equal constants]
Python's `==` says that 0.0 equals -0.0, and that 1, True and 1.0 are equal. The same holds for
containers of them. A nan does not equal itself. But a program that was traced with one of these
values is wrong for the others. So each static value of a call enters the key of its program as
`exact(value)`, which compares types and bits.

JAX compares the structures of arguments in C++, by Python's `==`. If a structure has static parts
that could equal other ones (`exact_structure` is not None), a step keeps one call path for each
exact structure.
"""

import dataclasses
import datetime
import decimal
import enum
import fractions
import struct
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxdist._values import Opened

# Types whose `==` already compares type and bits.
_PLAIN = frozenset(
    {bool, int, str, bytes, type, type(None), type(Ellipsis), types.FunctionType, np.dtype}
)
_BY_PARTS = (decimal.Decimal, datetime.date, datetime.time, fractions.Fraction)
_NEVER_ANOTHER = (str, bytes, type, enum.Enum, types.FunctionType, types.MethodType, np.dtype)
# The pytree nodes of these packages have static parts of one type only.
_TRUSTED = ("jax", "jaxlib", "jaxdist", "optax")


def exact(value: Any) -> Any:
    """Return a key that equals another value's key if both have the same type and bits.

    Tuples, frozen sets, named tuples and dataclasses are compared part by part, other objects by
    their own `==`. The key of a value that cannot be hashed cannot be hashed either.
    """
    kind = type(value)
    if kind in _PLAIN:
        return kind, value
    if kind is tuple:
        return kind, *map(exact, value)
    return (kind, *_exact_parts(kind, value))


def _exact_parts(kind: type, value: Any) -> tuple[Any, ...]:
    if isinstance(value, np.generic):
        return value.dtype, value.tobytes()
    # An unhashable value makes its key unhashable, and the caller raises an error that names it.
    # Members of an enum are singletons.
    if kind.__hash__ is None or isinstance(value, enum.Enum):
        return (value,)
    # A subclass with its own `==` decides itself what is equal.
    if isinstance(value, float) and kind.__eq__ is float.__eq__:
        return (struct.pack("d", value),)
    if isinstance(value, complex) and kind.__eq__ is complex.__eq__:
        return (struct.pack("dd", value.real, value.imag),)
    if isinstance(value, tuple) and kind.__eq__ is tuple.__eq__:
        return tuple(map(exact, value))
    if isinstance(value, frozenset) and kind.__eq__ is frozenset.__eq__:
        return (frozenset(map(exact, value)),)
    if isinstance(value, (slice, range)):
        return exact(value.start), exact(value.stop), exact(value.step)
    # Decimal("1.0") equals Decimal("1.00"), and times in different zones can be equal. The
    # arguments of their constructors differ.
    if isinstance(value, _BY_PARTS):
        return (exact(value.__reduce_ex__(4)[1]),)
    if isinstance(value, jax.tree_util.PyTreeDef):
        return value, exact_structure(value)
    if isinstance(value, Mapping):
        return (frozenset((exact(k), exact(v)) for k, v in value.items()),)
    if dataclasses.is_dataclass(value) and _is_generated(kind.__eq__):
        fields = (f for f in dataclasses.fields(value) if f.compare)
        held = ((f, getattr(value, f.name)) for f in fields)
        return tuple(_Unhashed(x) if f.hash is False else exact(x) for f, x in held)
    return (value,)


def _is_generated(compare: Any) -> bool:
    """Whether `@dataclass` generated this method (and the user did not write it)."""
    code = getattr(compare, "__code__", None)
    return code is not None and code.co_filename == "<string>"


@dataclasses.dataclass(frozen=True)
class _Unhashed:
    """The value of a field that its class compares but does not hash."""

    value: Any = dataclasses.field(hash=False)


def exact_structure(treedef: Any) -> Any:
    """Return the static parts that JAX would confuse with equal ones; None if there are none."""
    found: list[Any] = []
    _collect(treedef, found)
    return tuple(found) or None


def _collect(treedef: Any, found: list[Any]) -> None:
    node = treedef.node_data()
    if node is None:
        return
    kind, data = node
    static: Any = ()
    # JAX compares the keys of a dict, and the static data of a node, by `==`.
    if kind is dict:
        static = tuple(data)
    elif kind is Opened:
        static = data[1] or ()
    elif not _is_trusted(kind):
        static = data
    if _may_equal_another(static):
        found.append(exact(static))
    for child in treedef.children():
        _collect(child, found)


def _may_equal_another(value: Any) -> bool:
    """Whether `==` may hold between this value and one of another type or with other bits."""
    kind = type(value)
    if value is None or isinstance(value, _NEVER_ANOTHER) or kind.__eq__ is object.__eq__:
        return False
    if isinstance(value, (tuple, list, frozenset)):
        return any(map(_may_equal_another, value))
    if dataclasses.is_dataclass(value) and _is_generated(kind.__eq__):
        return any(_may_equal_another(getattr(value, f.name)) for f in dataclasses.fields(value))
    return not _is_trusted(kind)


def _is_trusted(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _TRUSTED


def dispatch_by_structure(make: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    """Return a call path that calls a separate one, built by `make`, for each exact structure."""
    known: dict[Any, Callable[..., Any]] = {}

    def call(*args: Any, **kwargs: Any) -> Any:
        key = exact_structure(jax.tree.structure((args, kwargs)))
        found = known.get(key)
        if found is None:
            found = known[key] = make()
        return found(*args, **kwargs)

    return call


def same_bits(values: Sequence[Any]) -> bool:
    """Whether arrays of this process have the same bits, shape and dtype.

    Cost:
        A copy of each array from its device.
    """
    # Bits, not `==`: a nan is equal to itself on all replicas, and 0.0 differs from -0.0.
    raw = [_read_bits(v) for v in values]
    return all(r == raw[0] for r in raw)


def has_known_bits(value: Any) -> bool:
    """Whether this process has the whole array, and it is not traced."""
    if isinstance(value, jax.core.Tracer):
        return False
    return not isinstance(value, jax.Array) or value.is_fully_addressable


def is_key(value: Any) -> bool:
    """Whether this is an array of random keys."""
    return bool(jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key))


def _read_bits(value: Any) -> tuple[Any, ...]:
    implementation = ""
    if is_key(value):
        implementation = str(jax.random.key_impl(value))
        # Inside a trace, `key_data` would become an operation of it.
        with jax.ensure_compile_time_eval():
            value = jax.random.key_data(value)
    host = np.asarray(value)
    # Objects have no bits of their own.
    data = host.tolist() if host.dtype.hasobject else host.tobytes()
    return implementation, host.shape, host.dtype, data
