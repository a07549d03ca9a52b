"""Arguments and results as they are sent: their leaves as arrays, their structure as JSON.

A structure is `"*"` for a leaf, None for None, `["list", s, ...]`, `["tuple", s, ...]`, or
`["dict", [key, ...], s, ...]` with sorted keys, which is the order of JAX. Two pytrees have the
same structure if and only if these are equal.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist import _compat
from jaxdist._called import name_call, refuse, refuse_type
from jaxdist._parameter_server.transport.message import get_names
from jaxdist._typing import PyTree
from jaxdist._validate import show
from jaxdist.errors import ArgumentTypeError, DonationError, ProgramMismatchError, UnsupportedError

# How a leaf was given: a number of Python fits several dtypes, an array only its own.
ARRAY: Final = "array"
Kind = Literal["array", "bool", "int", "float", "complex"]
NUMBERS = {"bool": bool, "int": int, "float": float, "complex": complex}
_ACCEPTS: dict[str, tuple[Any, ...]] = {
    "bool": (np.bool_,),
    "int": (jnp.integer, jnp.floating, jnp.complexfloating),
    "float": (jnp.floating, jnp.complexfloating),
    "complex": (jnp.complexfloating,),
}
# The kinds of dtypes that NumPy gives these numbers.
_STORED = {"bool": "b", "int": "iu", "float": "f", "complex": "c"}


def check_not_traced() -> None:
    """Raise `UnsupportedError` inside of a function that is being traced."""
    if _compat.is_inside_trace():
        raise UnsupportedError(
            f"{name_call()} was called while a function is traced.\n\n"
            "A traced function runs once in Python, and then as a program that has no values to "
            "send and no place to wait.\n\n"
            "Call it outside; or in the function by jax.experimental.io_callback, whose Python "
            "function calls the blocking method."
        )


def read_leaf(name: str, leaf: Any) -> tuple[np.ndarray, Kind]:
    """Return a leaf as an array that does not change any more, and how it was given.

    Raises:
        ArgumentTypeError: It is neither an array nor a number.
        ArgumentError: It is an integer of more than 64 bits.
        DonationError: It is an array that was donated or deleted.
        UnsupportedError: It is a traced value, or parts of it are on other processes.
    """
    if isinstance(leaf, jax.Array):
        return _read_array(name, leaf), ARRAY
    if isinstance(leaf, (np.ndarray, np.generic)) and not isinstance(leaf, np.ma.MaskedArray):
        # The caller may write into its own array before this one is sent.
        array = np.array(leaf, copy=True, order="C", subok=False)
        return _check_dtype(name, leaf, array), ARRAY
    kind: Any = type(leaf).__name__
    if NUMBERS.get(kind) is not type(leaf):
        raise _make_type_error(name, leaf)
    if kind == "int" and not -(2**63) <= leaf < 2**64:
        raise refuse(f"{name}={show(leaf)}.", "An integer has at most 64 bits.", "Pass a float.")
    return np.asarray(leaf), kind


def _read_array(name: str, leaf: jax.Array) -> np.ndarray:
    if isinstance(leaf, jax.core.Tracer):
        raise refuse(
            f"{name}={show(leaf)}, a value of a function that is traced.",
            "It has no numbers that could be sent.",
            "Return it from the function, and pass what the function returns.",
            kind=UnsupportedError,
        )
    if leaf.is_deleted():
        raise refuse(
            f"{name}, an array that was deleted or donated.",
            "Its memory is no longer its own.",
            "Pass the array that replaces it, or a copy that was made before.",
            kind=DonationError,
        )
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        raise _make_type_error(name, leaf)
    if not leaf.is_fully_addressable:
        raise refuse(
            f"{name}, an array with parts on other processes.",
            "A process sends what it has.",
            "Pass a replicated array, or gather it before.",
            kind=UnsupportedError,
        )
    return _check_dtype(name, leaf, np.asarray(leaf))


def _check_dtype(name: str, leaf: Any, array: np.ndarray) -> np.ndarray:
    native = array.dtype.newbyteorder("=")
    if native not in get_names():
        raise _make_type_error(name, leaf)
    return array.astype(native, copy=False)


def _make_type_error(name: str, leaf: Any) -> ArgumentTypeError:
    return refuse_type(
        f"{name}={show(leaf)}.",
        "A call can send numbers, and arrays of JAX or NumPy whose dtype is a number or bool.",
        "Pass a Variable as variable.value(), a random key as jax.random.key_data(key), and a "
        "string as an array of its bytes.",
    )


def fits(kind: str, value: np.ndarray, dtype: np.dtype) -> bool:
    """Whether a number of Python keeps its value as this dtype; floats, up to rounding."""
    # The kind comes from another process.
    if value.dtype.kind not in _STORED[kind]:
        return False
    if not any(jnp.issubdtype(dtype, accepted) for accepted in _ACCEPTS[kind]):
        return False
    if jnp.issubdtype(dtype, jnp.integer):
        bounds = jnp.iinfo(dtype)
        return int(bounds.min) <= int(value) <= int(bounds.max)
    if kind == "bool" or not np.isfinite(value):
        return True
    with np.errstate(over="ignore"):
        converted = value.astype(dtype)
    # An integer is a count or a number of a row, so it is exact.
    is_exact = kind != "int" or complex(converted.astype(np.complex128)) == int(value)
    return bool(np.isfinite(converted) and is_exact)


def as_jax(value: Any) -> jax.Array:
    """Return an array of JAX with the same dtype.

    Raises:
        UnsupportedError: JAX would store it with another dtype.
    """
    array = jnp.asarray(value)
    if hasattr(value, "dtype") and array.dtype != value.dtype:
        raise UnsupportedError(
            f"An array of {value.dtype} would become one of {array.dtype} here.\n\n"
            "JAX has 64 bits only where they are turned on.\n\n"
            "Call jax.config.update('jax_enable_x64', True) in the process of the server, or "
            f"declare {array.dtype} in input_signature."
        )
    return array


LEAF = "*"
# Fields of a message have at most 64 levels.
_DEEPEST = 50


def flatten(name: str, tree: PyTree) -> tuple[Any, list[tuple[str, Any]]]:
    """Return the structure of a pytree, and its leaves with their names.

    Args:
        name: The pytree, for errors and for the names of the leaves.
        tree: Dicts with strings as keys, lists, tuples and None; everything else is a leaf.

    Raises:
        ArgumentTypeError: A key is not a string, or a container is of a subclass.
        ArgumentError: It is nested too deeply.

    Example:
        >>> from jaxdist._parameter_server.rpc.values import flatten
        >>> flatten("args", [1, {"x": 2}])
        (['list', '*', ['dict', ['x'], '*']], [('args[0]', 1), ("args[1]['x']", 2)])
    """
    leaves: list[tuple[str, Any]] = []
    return _flatten(name, tree, leaves, 0), leaves


def _flatten(name: str, tree: Any, leaves: list[tuple[str, Any]], depth: int) -> Any:
    if tree is None:
        return None
    if not isinstance(tree, (dict, list, tuple)):
        leaves.append((name, tree))
        return LEAF
    if depth == _DEEPEST:
        raise refuse(
            f"{name}, which is {depth + 1} levels deep.",
            f"Structures have at most {_DEEPEST} levels.",
            "Pass flatter lists and dicts.",
        )
    # A subclass would arrive as the plain class.
    kind = type(tree)
    if kind is dict and all(type(key) is str and is_sendable(key) for key in tree):
        keys = sorted(tree)
        inner = [_flatten(f"{name}[{key!r}]", tree[key], leaves, depth + 1) for key in keys]
        return ["dict", keys, *inner]
    if kind is list or kind is tuple:
        inner = [
            _flatten(f"{name}[{number}]", item, leaves, depth + 1)
            for number, item in enumerate(tree)
        ]
        return [kind.__name__, *inner]
    raise refuse_type(
        f"{name}={show(tree)}.",
        "A call can send dicts with strings as keys, lists, tuples and None, with arrays and "
        "numbers in them.",
        "Make a dict or a tuple of it.",
    )


def is_sendable(text: str) -> bool:
    """Whether a string can be sent: half of a surrogate pair cannot."""
    return text.encode(errors="ignore").decode() == text


def unflatten(structure: Any, leaves: Sequence[Any]) -> PyTree:
    """Return the pytree of a structure that another process has sent.

    Raises:
        ProgramMismatchError: It is not a structure, or has another number of leaves.
    """
    given = iter(leaves)
    try:
        tree = _unflatten(structure, given, 0)
        if next(given, LEAF) is not LEAF:
            raise ValueError
    except (ValueError, StopIteration):
        raise ProgramMismatchError(
            f"A message has a structure that is not valid, with {len(leaves)} array(s).\n\n"
            "A structure is written by jaxdist.\n\n"
            "Install the same version of jaxdist for the server and its clients."
        ) from None
    return tree


def _unflatten(structure: Any, leaves: Iterator[Any], depth: int) -> Any:
    if structure is None:
        return None
    if structure == LEAF:
        return next(leaves)
    if not isinstance(structure, list) or not structure or depth > _DEEPEST:
        raise ValueError
    kind, *inner = structure
    if kind == "dict":
        if not inner or not isinstance(inner[0], list):
            raise ValueError
        keys, *inner = inner
        if len(keys) != len(inner) or not all(isinstance(key, str) for key in keys):
            raise ValueError
        values = [_unflatten(item, leaves, depth + 1) for item in inner]
        return dict(zip(keys, values, strict=True))
    if kind not in ("list", "tuple"):
        raise ValueError
    items = [_unflatten(item, leaves, depth + 1) for item in inner]
    return items if kind == "list" else tuple(items)


class Shown:
    """A leaf in an error: its dtype and shape."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def format_tree(structure: Any, leaves: Sequence[str]) -> str:
    """Return a structure as errors show it, such as `(int32[], {'x': float32[n, 3]})`."""
    text = repr(unflatten(structure, [Shown(leaf) for leaf in leaves]))
    return text if len(text) <= 300 else f"{text[:297]}..."
