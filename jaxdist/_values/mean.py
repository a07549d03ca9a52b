"""The mean of many values, as a sum that does not overflow: one rule for every way to reduce.

A sum may be too large for its dtype although the mean is not. So jaxdist adds up shares of the
values: each value divided by the smallest power of two that is not below their number. Such a
division rounds nothing. The sum of the shares is no larger than the largest value. One division by
a number between 1/2 and 1 remains.

float16 and the 8-bit floats have few exponents, so shares of small values would become 0. These
dtypes are added up in float32, which has room for their sums.

The rule has a cost: shares below the smallest normal number of float32, bfloat16 and float64 are
rounded, or become 0 where the processor has no subnormal numbers. This affects means below
`count * 1e-38`.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np


def share_of_mean(array: Any, count: int) -> Any:
    """Return the share of one array in the mean of `count` arrays: the mean adds up the shares.

    Args:
        array: An array of JAX or NumPy. Integers and booleans are added up in JAX's default float.
        count: Number of values in the mean.
    """
    dtype = _sum_dtype(array.dtype)
    shares = array if array.dtype == dtype else array.astype(dtype)
    return _multiply(shares, 1 / next_power_of_two(count)) if _is_divided(array.dtype) else shares


def mean_of_shares(total: Any, dtype: Any, count: int) -> Any:
    """Return the mean from the sum of the shares, in the dtype of `mean_dtype`.

    Args:
        total: The sum of the results of `share_of_mean`; its dtype may be wider.
        dtype: Dtype of the values.
        count: Number of values in the mean.
    """
    divisor = count / next_power_of_two(count) if _is_divided(dtype) else count
    mean = divide_parts(total, divisor)
    return mean if mean.dtype == mean_dtype(dtype) else mean.astype(mean_dtype(dtype))


def mean_dtype(dtype: Any) -> Any:
    """Return the dtype of a mean: floats and complex keep theirs, others use the default float."""
    return dtype if jnp.issubdtype(dtype, np.inexact) else jnp.result_type(float)


def wide_dtype(dtype: Any) -> Any:
    """Return the dtype in which many numbers of `dtype` are added: at least float32."""
    # NumPy knows no mode of promotion, and it has a dtype for every float of 8 bits.
    is_inexact = jnp.issubdtype(dtype, np.inexact)
    return np.promote_types(dtype, np.float32) if is_inexact else np.dtype(np.float32)


def widen(array: Any) -> Any:
    """Return narrow floats in float32, so that long sums of them stay precise, and others as is."""
    is_narrow = jnp.issubdtype(array.dtype, jnp.floating) and array.dtype.itemsize < 4
    return array.astype(jnp.float32) if is_narrow else array


def _sum_dtype(dtype: Any) -> Any:
    if not jnp.issubdtype(dtype, np.inexact):
        return jnp.result_type(float)
    return np.dtype(np.float32) if _has_few_exponents(dtype) else dtype


def _is_divided(dtype: Any) -> bool:
    """Whether values of this dtype are divided before they are added, against overflow."""
    return bool(jnp.issubdtype(dtype, np.inexact)) and not _has_few_exponents(dtype)


def _has_few_exponents(dtype: Any) -> bool:
    # The largest float16 is 65504; for dtypes with enough exponents it is 3e38 or more.
    return bool(jnp.issubdtype(dtype, np.floating)) and float(jnp.finfo(dtype).max) < 1e9


def next_power_of_two(count: int) -> float:
    """Return the smallest power of two that is not below `count`, the divisor of the shares."""
    # By bits, not by `log2`, which is inexact for large numbers.
    return float(1 << max(count - 1, 0).bit_length())


def divide_parts(array: Any, divisor: float) -> Any:
    """Return `array / divisor`; complex numbers are divided part by part."""
    # Complex division would turn the other part of an infinite number into nan.
    return array if divisor == 1 else _map_parts(array, lambda x: x / np.asarray(divisor, x.dtype))


def _multiply(array: Any, factor: float) -> Any:
    return array if factor == 1 else _map_parts(array, lambda x: x * np.asarray(factor, x.dtype))


def _map_parts(array: Any, fn: Callable[[Any], Any]) -> Any:
    if not jnp.issubdtype(array.dtype, np.complexfloating):
        return fn(array)
    if isinstance(array, jax.Array):
        return jax.lax.complex(fn(array.real), fn(array.imag))
    # NumPy has no function that joins two parts; `real + 1j * imag` makes nan of infinities.
    made = np.empty_like(array)
    made.real, made.imag = fn(array.real), fn(array.imag)
    return made


Combine: TypeAlias = Callable[[Any, Any], Any]


def combine_pairwise(rows: Any, combine: Combine) -> Any:
    """Combine dim 0 of an array pair by pair.

    Shapes:
        In: `[n, ...]`. Out: `[...]`. With odd `n`, the last row joins in the next round.
    """
    # A binary tree: with powers of two, the rows of each device are a subtree of it, so the bits of
    # the result do not depend on the number of devices. `rows.sum()` has no such order.
    while rows.shape[0] > 1:
        count = rows.shape[0]
        pairs = combine(rows[0 : count - count % 2 : 2], rows[1::2])
        rows = jnp.concatenate([pairs, rows[-1:]]) if count % 2 else pairs
    return rows[0]
