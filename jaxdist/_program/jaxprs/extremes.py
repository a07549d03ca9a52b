"""Maxima and minima over replicas that keep nan.

`jnp.max` is nan where one number is, and so is `jax.lax.pmax` by its definition. The all-reduces of
XLA's CPU backend leave nan out. Integers have no nan: the bits of floats, with those of negative
numbers turned round, are integers in the same order. A nan becomes the largest of all for a
maximum, the smallest for a minimum, and comes back as nan. -0.0 is below 0.0.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

EXTREMES = frozenset({"pmax", "pmin"})


def extreme_by_order(
    name: str, operands: Sequence[Any], communicate: Callable[[list[Any]], list[Any]]
) -> list[Any]:
    """`pmax` or `pmin` of floats as one of integers, of as many bytes.

    Args:
        name: Of the primitive.
        operands: Of any dtypes; what are no floats goes as it is.
        communicate: The collective itself, of all operands.
    """
    keys = [_key(x, name == "pmax") if _is_float(x) else x for x in operands]
    results = communicate(keys)
    return [
        _number(r, x.dtype) if _is_float(x) else r for r, x in zip(results, operands, strict=True)
    ]


def extreme_of_rows(name: str, rows: Sequence[Any]) -> Any:
    """The maximum or minimum of arrays in one place, element by element.

    XLA's CPU backend loses nan when it reduces a dim of an array of some thousand numbers, and
    keeps it when it compares two arrays.
    """
    combine = jax.lax.max if name == "pmax" else jax.lax.min
    whole = rows[0]
    for row in rows[1:]:
        whole = combine(whole, row)
    return whole


def _is_float(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits >= 8)


def _key(x: Any, is_max: bool) -> Any:
    integers = jnp.dtype(f"int{8 * x.dtype.itemsize}")
    bounds = jnp.iinfo(integers)
    key = _turn_round(jax.lax.bitcast_convert_type(x, integers))
    return jnp.where(jnp.isnan(x), jnp.array(bounds.max if is_max else bounds.min, integers), key)


def _number(key: Any, dtype: Any) -> Any:
    return jax.lax.bitcast_convert_type(_turn_round(key), dtype)


def _turn_round(bits: Any) -> Any:
    """The bits but the sign, inverted for negative numbers; undoes itself."""
    bounds = jnp.iinfo(bits.dtype)
    sign = jax.lax.shift_right_arithmetic(bits, jnp.array(bounds.bits - 1, bits.dtype))
    return bits ^ (sign & jnp.array(bounds.max, bits.dtype))
