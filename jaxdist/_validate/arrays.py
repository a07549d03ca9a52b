"""Checks of arguments that are arrays or dtypes, with JAX."""

import contextlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist._called import refuse, refuse_type
from jaxdist._integers import MASKED, check_fits
from jaxdist._validate.arguments import show, spell_dtype


def as_floating(name: str, dtype: Any) -> Any:
    """Check that `dtype` is a floating-point dtype, and return it."""
    with contextlib.suppress(TypeError):
        found = jnp.dtype(spell_dtype(dtype))
        if jnp.issubdtype(found, jnp.floating):
            return found
    raise refuse_type(
        f"{name}={show(dtype)}.",
        "Arrays of floating-point numbers are sent and returned in this dtype.",
        f"Pass for instance {name}=jnp.bfloat16, or leave it out.",
    )


def as_array(name: str, value: Any) -> jax.Array:
    """Return `value` as an array of JAX, or raise an error that names it."""
    if isinstance(value, jax.Array):
        return value
    check_fits(name, value)
    try:
        return jnp.asarray(value)
    except OverflowError:
        bounds = jnp.iinfo(jax.dtypes.canonicalize_dtype("int64"))
        # Propose 64 bits only where they help: NumPy makes an object array of larger integers.
        helps = bounds.bits == 32 and np.asarray(value).dtype.kind in "iu"
        wider = ", or turn on 64 bits: jax.config.update('jax_enable_x64', True)" * helps
        raise refuse(
            f"{name}={show(value)}.",
            f"Python integers become {bounds.dtype}, which ends at {bounds.min} and {bounds.max}.",
            f"Pass a float{wider}.",
        ) from None
    except (TypeError, ValueError) as error:
        raise refuse_type(
            f"{name}={show(value)}.",
            f"{name} is an array or a number.",
            "Pass an array of jax or numpy whose dtype is a number or bool.",
        ) from error


def as_arrays(name: str, tree: Any) -> Any:
    """Return `tree` with arrays of JAX as leaves, or raise an error that names the leaf."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: as_array(name + jax.tree_util.keystr(path), leaf), tree
    )


class NotOfJax(NamedTuple):
    """Why JAX has no such array, and what to pass instead."""

    found: str
    rule: str
    remedy: str


# XLA knows their names, and makes no arrays of them.
_ONLY_NAMES = {"int1", "uint1", "float6_e2m3fn", "float6_e3m2fn"}


def find_not_of_jax(value: Any, dtype: Any) -> NotOfJax | None:
    """Return why JAX has no array like this one, or None if it has.

    Args:
        value: An array.
        dtype: Its dtype; one that is not of NumPy (of random keys, or None) is not judged.

    Returns:
        The reason. Its remedy is empty for values that are not numbers.
    """
    if isinstance(value, np.ma.MaskedArray):
        return NotOfJax(*MASKED)
    if not isinstance(dtype, np.dtype) or _is_of_jax(dtype):
        return None
    if dtype.name in _ONLY_NAMES:
        to = "int8" if "int" in dtype.name else "float16"
        rule = f"XLA makes no arrays of {dtype}."
        return NotOfJax(f"an array of dtype {dtype}", rule, _advise_cast(to))
    rule = (
        "JAX has arrays of numbers and booleans, with up to 64 bits for a real number, in the byte "
        "order of the machine."
    )
    if dtype.names is not None:
        remedy = "Pass the fields as a dict of arrays: {k: array[k] for k in array.dtype.names}."
        return NotOfJax(f"an array with the fields {list(dtype.names)}", rule, remedy)
    return NotOfJax(f"an array of dtype {dtype}", rule, _advise(dtype))


def _is_of_jax(dtype: np.dtype[Any]) -> bool:
    """Whether JAX has arrays of this dtype, possibly with 32 bits instead of 64."""
    if dtype.kind == "V":
        return dtype.type is not np.void and dtype.name not in _ONLY_NAMES
    # Not in "OSUTMm": objects, text and times. "W" are complex numbers of 16 bits for each part.
    if dtype.kind not in "biufc" or not dtype.isnative:
        return False
    return dtype.kind not in "fc" or dtype.itemsize <= (8 if dtype.kind == "f" else 16)


def _advise(dtype: np.dtype[Any]) -> str:
    if dtype.kind in "fc":
        # Longer than 64 bits for a real number, or in another byte order.
        most = 8 if dtype.kind == "f" else 16
        return _advise_cast(np.dtype(f"{dtype.kind}{min(dtype.itemsize, most)}").name)
    if dtype.kind in "iu":
        return _advise_cast(dtype.newbyteorder("=").name)
    return _advise_cast("complex64") if dtype.kind == "W" else ""


def _advise_cast(dtype: str) -> str:
    return f"Cast it first: value.astype({dtype!r})."


def check_of_jax(name: str, value: Any) -> None:
    """Raise for an array that JAX does not have: masked, or of another dtype."""
    why = find_not_of_jax(value, getattr(value, "dtype", None))
    if why is not None:
        remedy = why.remedy or "Pass numbers instead, or leave it out."
        raise refuse_type(f"{name}, {why.found}.", why.rule, remedy)


def is_array(value: Any) -> bool:
    """Whether JAX treats `value` as an array: also tracers, numbers, and shapes with a dtype."""
    if isinstance(value, (jax.Array, bool, int, float, complex)):
        return True
    # "V" is the kind of bfloat16 and of the 8-bit floats, which NumPy does not know.
    kind = getattr(getattr(value, "dtype", None), "kind", None)
    return hasattr(value, "shape") and kind is not None and kind in "biufcV"


def check_has_arrays(name: str, tree: Any, what: str = "a pytree of arrays") -> None:
    """Raise if a pytree has leaves and none is an array; an empty pytree is valid."""
    leaves = jax.tree.leaves(tree)
    if leaves and not any(map(is_array, leaves)):
        raise refuse_type(
            f"{name}={show(tree)}, in which no leaf is an array.",
            f"{name} is {what}.",
            f"Pass for instance {name}={{'w': jnp.ones((2, 2))}}.",
        )
