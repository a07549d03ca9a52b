"""First values of large variables that the server computes, so that they do not travel."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from jaxdist._called import called, refuse
from jaxdist._values import check_is_real
from jaxdist.errors import ShapeError

# Smaller values are sent: compiling a program takes longer.
_LARGE = 2**24
# A program with larger constants is no smaller than the value that it makes.
_MOST_CONSTANTS = 2**20


@dataclasses.dataclass(frozen=True)
class ExportedInitial:
    """A program that makes the first value of a variable.

    Args:
        shape: The shape of the value.
        dtype: Its dtype.
        content: The bytes of the exported function.
    """

    shape: tuple[int, ...]
    dtype: Any
    content: bytes


def is_known_form(shape: Any, dtype: Any) -> bool:
    """Return whether both are given, and valid; the checks of variables name what is not."""
    try:
        jnp.dtype(dtype)
        return dtype is not None and all(n >= 0 for n in shape)
    except (TypeError, ValueError):
        return False


@called(lambda name: f"Variable {name!r}")
def export_initial(
    name: str, make: Callable[[], Any], shape: Sequence[int], dtype: Any
) -> ExportedInitial | Any:
    """Return a program for the server, or the value where a program is not possible.

    A function that computes with JAX is traced and exported. The value of any other function, such
    as one of NumPy, is made here.

    Args:
        name: The name of the variable.
        make: The function; it is called once, or traced once and then called.
        shape: The shape of the variable.
        dtype: Its dtype.

    Raises:
        ShapeError: The function makes another shape.
    """
    wanted = jax.dtypes.canonicalize_dtype(dtype)
    if math.prod(shape) * wanted.itemsize < _LARGE:
        return make()
    plain: list[Any] = []

    def compute() -> Any:
        value = make()
        if not isinstance(value, jax.core.Tracer):
            # Tracing it would make it a constant of the program.
            plain.append(value)
            return jnp.zeros(())
        check_is_real(name, value.dtype, wanted)
        return value.astype(wanted)

    try:
        traced = jax.jit(compute).trace()
    except jax.errors.JAXTypeError:
        # The function needs values while it runs: `float(x)`, `np.asarray(x)`, `if x:`.
        return make()
    if plain:
        return plain[0]
    closed = traced.jaxpr
    found = tuple(closed.out_avals[0].shape)
    if found != tuple(shape):
        raise refuse(
            f"an initial_value that makes the shape {list(found)}, and shape={list(shape)}.",
            "The function makes the value of the whole variable.",
            f"Let it return an array of shape {list(shape)}.",
            kind=ShapeError,
        )
    constants = sum(int(np.size(x)) * x.dtype.itemsize for x in closed.consts)
    if constants > _MOST_CONSTANTS or closed.effects:
        return make()
    program = export.export(jax.jit(compute), platforms=["cpu"])()
    return ExportedInitial(found, wanted, bytes(program.serialize()))
