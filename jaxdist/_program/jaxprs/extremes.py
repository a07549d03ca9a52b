"""Maxima and minima over replicas that keep nan.

`jnp.max` returns nan if one number is nan, and `jax.lax.pmax` is defined to do the same. But the
all-reduces of XLA's CPU backend ignore nan. So jaxdist compares integers, which have no nan. The
bits of floats, with all but the sign inverted for negative numbers, are integers in the same
order. A nan becomes the largest integer for a maximum and the smallest for a minimum, and is nan
again in the result. -0.0 is less than 0.0.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

EXTREMES = frozenset({"pmax", "pmin"})


def compute_extreme_on_integers(
    name: str, operands: Sequence[Any], communicate: Callable[[list[Any]], list[Any]]
) -> list[Any]:
    """Compute `pmax` or `pmin` of floats on integers of the same number of bytes.

    Args:
        name: The name of the primitive.
        operands: The operands, of any dtypes; only floats are converted.
        communicate: The collective itself, on all operands.
    """
    keys = [_to_ordered_integers(x, name == "pmax") if _is_float(x) else x for x in operands]
    results = communicate(keys)
    return [
        jax.lax.bitcast_convert_type(_invert_if_negative(r), x.dtype) if _is_float(x) else r
        for r, x in zip(results, operands, strict=True)
    ]


def compute_extreme(name: str, rows: Sequence[Any]) -> Any:
    """Return the elementwise maximum or minimum of several arrays on one device.

    XLA's CPU backend loses nan when it reduces a dim of an array of some thousand numbers. It
    keeps nan when it compares two arrays.
    """
    combine = jax.lax.max if name == "pmax" else jax.lax.min
    return functools.reduce(combine, rows)


def _is_float(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits >= 8)


def _to_ordered_integers(x: Any, is_max: bool) -> Any:
    integers = jnp.dtype(f"int{8 * x.dtype.itemsize}")
    bounds = jnp.iinfo(integers)
    key = _invert_if_negative(jax.lax.bitcast_convert_type(x, integers))
    return jnp.where(jnp.isnan(x), jnp.array(bounds.max if is_max else bounds.min, integers), key)


def _invert_if_negative(bits: Any) -> Any:
    """Invert all bits but the sign of negative numbers; this is its own inverse."""
    bounds = jnp.iinfo(bits.dtype)
    sign = jax.lax.shift_right_arithmetic(bits, jnp.array(bounds.bits - 1, bits.dtype))
    return bits ^ (sign & jnp.array(bounds.max, bits.dtype))
