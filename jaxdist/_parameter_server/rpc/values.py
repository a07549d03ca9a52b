"""Leaves of arguments and results as arrays that can be sent, and back."""

from typing import Any, Final, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist import _compat
from jaxdist._called import name_call, refuse, refuse_type
from jaxdist._parameter_server.transport.message import get_names
from jaxdist._validate import show
from jaxdist.errors import ArgumentTypeError, DonationError, UnsupportedError

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
    """Return a leaf as an array that nobody changes, and how it was given.

    Raises:
        ArgumentTypeError: It is no array and no number.
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
            f"{name}, an array of which parts are on other processes.",
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
        "What is sent are numbers, and arrays of JAX or NumPy whose dtype is a number or bool.",
        "Pass a Variable as variable.value(), a random key as jax.random.key_data(key), and a "
        "text as an array of its bytes.",
    )


def fits(kind: str, value: np.ndarray, dtype: np.dtype) -> bool:
    """Whether a number of Python keeps its value as this dtype, up to rounding."""
    # Another process says what kind it is.
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
        return bool(np.isfinite(value.astype(dtype)))


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
