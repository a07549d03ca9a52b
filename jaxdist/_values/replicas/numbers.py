"""Python integers, and values of several dtypes, as values of replicas."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.errors import ReplicaValueError


def is_python_number(value: Any) -> bool:
    """Whether a value is a Python number, or a list of them, instead of an array."""
    return not hasattr(value, "dtype")


def check_integers(name: object, replica: int, value: Any) -> None:
    """Raise if a Python integer does not fit JAX's integer dtype."""
    if not is_python_number(value) or isinstance(value, (bool, float, complex, str, bytes)):
        return
    # Checked in NumPy, where nothing is lost: JAX would silently truncate a list to 32 bits.
    held = np.asarray(value)
    # Integers beyond 64 bits become an object array.
    is_large = held.dtype == object and all(isinstance(n, int) for n in held.flat)
    if held.size and (held.dtype.kind in "iu" or is_large):
        bounds = np.iinfo(jax.dtypes.canonicalize_dtype(np.int64))
        outside = [n for n in (held.min(), held.max()) if not bounds.min <= n <= bounds.max]
        if outside:
            raise ReplicaValueError(
                f"{name} is a PerReplica whose value on replica {replica} has the Python integer "
                f"{outside[0]}, and {explain_too_large(int(outside[0]), bounds)}"
            )


def suggest_cast(name: str, dtypes: Iterable[Any]) -> str:
    """Return the remedy for values of several dtypes: the cast to JAX's common dtype."""
    try:
        wide = jnp.result_type(*(jax.dtypes.canonicalize_dtype(dtype) for dtype in dtypes))
    except (TypeError, ValueError):  # random keys, for instance, have no common dtype
        return "Give every replica values of the same dtype."
    return f"Cast them to one dtype first: {name}.astype({wide.name!r})."


def explain_too_large(number: int, bounds: "np.iinfo[Any]") -> str:
    """Return the end of an error for a Python integer outside of these bounds."""
    helps = not jax.config.read("jax_enable_x64") and -(1 << 63) <= number < 1 << 63
    wider = ", or turn on 64 bits: jax.config.update('jax_enable_x64', True)" if helps else ""
    return (
        f"{bounds.dtype} ends at {bounds.min} and {bounds.max}.\n\n"
        "Python integers are exact here, or an error; arrays of integers wrap around, as those "
        "of JAX and NumPy do.\n\n"
        f"Pass floats{wider}."
    )
