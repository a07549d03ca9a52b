"""The mean of many values, as a sum that does not overflow: one rule for every way to reduce.

A sum may be too large for its dtype where the mean is not. So what is added up are shares of the
values: each value divided by the power of two that is next to their number, which rounds nothing.
The sum of the shares is no larger than the largest value, and what is left is a division by a
number between 1/2 and 1. float16 and the 8-bit floats have few exponents, and shares of small
values would be lost; they are added up in float32, which has room for their sums.

What the rule costs: shares below the smallest number of float32, bfloat16 and float64 are rounded,
or 0 where the processor has no subnormal numbers. That is so for means below `count * 1e-38`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def share_of_mean(array: Any, count: int) -> Any:
    """What to add up for the mean of `count` arrays of this dtype.

    Args:
        array: Of JAX or NumPy; integers and booleans are added up in JAX's default float.
        count: How many values the mean is of.
    """
    dtype = _summed_in(array.dtype)
    shares = array if array.dtype == dtype else array.astype(dtype)
    return _times(shares, 1 / power_of_two_from(count)) if _is_divided(array.dtype) else shares


def mean_of_shares(total: Any, dtype: Any, count: int) -> Any:
    """The mean, in the dtype that `mean_dtype` gives, from the sum of shares.

    Args:
        total: The sum of what `share_of_mean` gave; it may be of a wider dtype than that.
        dtype: Of the values.
        count: How many values the mean is of.
    """
    divisor = count / power_of_two_from(count) if _is_divided(dtype) else count
    mean = divided(total, divisor)
    return mean if mean.dtype == mean_dtype(dtype) else mean.astype(mean_dtype(dtype))


def mean_dtype(dtype: Any) -> Any:
    """Floats and complex numbers keep their dtype; JAX's default float for the others."""
    return dtype if jnp.issubdtype(dtype, np.inexact) else jnp.result_type(float)


def _summed_in(dtype: Any) -> Any:
    if not jnp.issubdtype(dtype, np.inexact):
        return jnp.result_type(float)
    return np.dtype(np.float32) if _has_few_exponents(dtype) else dtype


def _is_divided(dtype: Any) -> bool:
    """Whether values are divided before they are added: where a sum of them may overflow."""
    return bool(jnp.issubdtype(dtype, np.inexact)) and not _has_few_exponents(dtype)


def _has_few_exponents(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, np.floating)) and float(jnp.finfo(dtype).max) < 1e9


def power_of_two_from(count: int) -> float:
    """The smallest power of two that is not below `count`: what values are divided by first."""
    return float(1 << max(count - 1, 0).bit_length())


def divided(array: Any, divisor: float) -> Any:
    """`array / divisor`, for complex numbers by their parts.

    As one complex number, infinity divided by a number would have nan for its other part.
    """
    return array if divisor == 1 else _by_parts(array, lambda x: x / np.asarray(divisor, x.dtype))


def _times(array: Any, factor: float) -> Any:
    return array if factor == 1 else _by_parts(array, lambda x: x * np.asarray(factor, x.dtype))


def _by_parts(array: Any, fn: Callable[[Any], Any]) -> Any:
    if not jnp.issubdtype(array.dtype, np.complexfloating):
        return fn(array)
    if isinstance(array, jax.Array):
        return jax.lax.complex(fn(array.real), fn(array.imag))
    made = np.empty_like(array)
    made.real, made.imag = fn(array.real), fn(array.imag)
    return made
