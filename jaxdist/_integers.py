"""Checks 64-bit integers, which JAX cuts off to 32 bits unless 64 bits are turned on.

# Note [Integers of 64 bits]
Without `jax_enable_x64`, JAX keeps the lower 32 bits of an int64 or uint64 array, without a
warning: 2**40 + 5 becomes 5. An identifier that is cut off is a different identifier. So every
value that enters jaxdist from the host passes one of these checks. Values that fit are converted.

Only arrays of 64-bit integers are read, once (for their smallest and largest element). A float64
that float32 cannot hold raises no error: as everywhere in JAX it is rounded, or becomes inf, which
shows in the results.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxdist._called import name_call
from jaxdist.errors import ArgumentError

_HOST = (np.ndarray, np.generic)


class CutOff(NamedTuple):
    """Integers that JAX would cut off."""

    dtype: np.dtype[Any]
    low: int
    high: int

    def explain(self) -> str:
        """Return the end of an error message: the value, the rule, and the remedy."""
        kept = jax.dtypes.canonicalize_dtype(self.dtype)
        bounds = np.iinfo(kept)
        wide = " or uint32" * (0 <= self.low and bounds.max < self.high < 1 << 32)
        return (
            f"{self.dtype} with integers from {self.low} to {self.high}.\n\n"
            f"Without jax_enable_x64, JAX makes {kept} of {self.dtype}, from {bounds.min} to "
            f"{bounds.max}, and would cut off bits.\n\n"
            "Turn on 64 bits before arrays are made: jax.config.update('jax_enable_x64', True). "
            f"Or pass smaller integers as int32{wide}, two halves (x >> 32 and x & 0xffffffff as "
            "uint32), or floats."
        )


def find_cut_off(value: Any) -> CutOff | None:
    """Return the range of a NumPy array whose integers JAX would cut off; None if all fit.

    Cost:
        Reads the array once if it has 64-bit integers and x64 is off; otherwise nothing.
    """
    if not isinstance(value, _HOST):
        return None
    dtype = value.dtype
    if dtype.itemsize != 8 or dtype.kind not in "iu" or not value.size:
        return None
    kept = jax.dtypes.canonicalize_dtype(dtype)
    if kept.itemsize == 8:
        return None
    low, high = int(value.min()), int(value.max())
    bounds = np.iinfo(kept)
    return None if bounds.min <= low and high <= bounds.max else CutOff(dtype, low, high)


def list_host_arrays(tree: Any) -> list[Any]:
    """Return the leaves of a pytree that are NumPy arrays or scalars."""
    # A comprehension is fast; this runs in each step, over all leaves.
    return [x for x in jax.tree.leaves(tree) if isinstance(x, _HOST)]


def has_cut_off(values: Iterable[Any]) -> bool:
    """Return whether JAX would cut off integers of one of these arrays."""
    return any(find_cut_off(x) is not None for x in values)


def check_fits(name: object, value: Any) -> None:
    """Raise an error if JAX would cut off integers; see Note [Integers of 64 bits].

    Args:
        name: The name of the value with its pytree path; the error has `str(name)`.
        value: Any value; only NumPy arrays are checked.
    """
    found = find_cut_off(value)
    if found is not None:
        raise ArgumentError(f"{name_call()} was given {name}, {found.explain()}")


def check_all_fit(name: str, tree: Any) -> None:
    """Raise an error, with the path of the leaf, if JAX would cut off integers of a leaf."""
    if has_cut_off(jax.tree.leaves(tree)):
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            check_fits(f"{name}{jax.tree_util.keystr(path)}", leaf)
