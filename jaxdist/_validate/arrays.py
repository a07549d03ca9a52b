"""Checks of arguments that are arrays or dtypes, with JAX."""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist._called import refuse, refuse_type
from jaxdist._integers import check_fits
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


def check_not_masked(name: str, value: Any) -> None:
    """Raise for a masked array: `np.asarray` drops its mask, and the numbers below would count."""
    if isinstance(value, np.ma.MaskedArray):
        raise refuse_type(
            f"{name}, a masked array.",
            "JAX has no masked arrays.",
            "Pass value.filled(0), and the mask as an array beside it.",
        )


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
