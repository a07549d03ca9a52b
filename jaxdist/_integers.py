"""Checks values from the host: 64-bit integers, which JAX may cut off, and masked arrays.

# Note [Integers of 64 bits]
Without `jax_enable_x64`, JAX keeps the lower 32 bits of an int64 or uint64 array, without a
warning: 2**40 + 5 becomes 5. An identifier that is cut off is a different identifier. So every
value that enters jaxdist from the host passes one of these checks. Values that fit are converted.

Only arrays of 64-bit integers are read, once (for their smallest and largest element). A float64
that float32 cannot hold raises no error: as everywhere in JAX it is rounded, or becomes inf, which
shows in the results.

The same checks refuse masked arrays of NumPy: `np.asarray` drops a mask without a warning, and the
numbers below it would count.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxdist._called import name_call, refuse_type
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


def is_unfit(value: Any) -> bool:
    """Return whether `check_fits` raises for a value."""
    return isinstance(value, np.ma.MaskedArray) or find_cut_off(value) is not None


def has_unfit(values: Iterable[Any]) -> bool:
    """Return whether `check_fits` raises for one of these values."""
    return any(map(is_unfit, values))


MASKED = (
    "a masked array",
    "JAX has no masked arrays.",
    "Pass value.filled(0), and the mask as an array beside it.",
)


def check_not_masked(name: object, value: Any) -> None:
    """Raise an error for a masked array; `check_fits` does the same."""
    if isinstance(value, np.ma.MaskedArray):
        found, rule, remedy = MASKED
        raise refuse_type(f"{name}, {found}.", rule, remedy)


def check_fits(name: object, value: Any) -> None:
    """Raise for integers that JAX would cut off (Note [Integers of 64 bits]), and masked arrays.

    Args:
        name: The name of the value with its pytree path; the error has `str(name)`.
        value: Any value; only NumPy arrays are checked.
    """
    check_not_masked(name, value)
    found = find_cut_off(value)
    if found is not None:
        raise ArgumentError(f"{name_call()} was given {name}, {found.explain()}")


def check_all_fit(name: str, tree: Any) -> None:
    """Raise an error, with the path of the leaf, if a leaf does not fit."""
    if has_unfit(jax.tree.leaves(tree)):
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            check_fits(f"{name}{jax.tree_util.keystr(path)}", leaf)
