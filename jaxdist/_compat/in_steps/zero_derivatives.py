"""Derivatives of operations without elements, where JAX leaves them out."""

# Note [Derivatives of empty results]
# A lookup of no rows gives an empty array, which JAX makes as a constant. So JAX never computes the
# derivative with respect to the table, and operations before the table have no backward pass. If
# the table was gathered from all replicas, the reduce-scatter of its gradient is missing on a
# replica without rows, and the other replicas wait for it. A convolution of no rows, `jnp.where`
# and others do the same. In a block of `keep_zero_derivatives` the derivative is an array of zeros,
# which is computed like any other.

import contextlib
import functools
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import ad_util as _ad_util
from jax._src import source_info_util as _source_info
from jax._src.interpreters import ad as _ad
from jax._src.lax import convolution as _convolution
from jax._src.numpy import indexing as _indexing
from jax._src.numpy import util as _util
from jax._src.ops import scatter as _scatter
from jax.extend.core.primitives import reduce_prod_p

from jaxdist._compat.tracing import list_modules_of_jax, set_in_block

_IS_ON: ContextVar[bool] = ContextVar("jaxdist_keeps_zero_derivatives", default=False)

# The lines that JAX names in programs outside of steps are those of the user's code.
_source_info.register_exclusion(__file__)


def keep_zero_derivatives() -> contextlib.AbstractContextManager[None]:
    """Compute the derivatives of empty results in the block, in this thread.

    See Note [Derivatives of empty results]. Waits for JAX to compute them.
    """
    _install()
    return set_in_block(_IS_ON, True)


@functools.cache
def _install() -> None:
    # The functions are global and other threads may trace at the same time, so the switch is a
    # context variable.
    _wrap(_indexing, "_gather", [0])
    _wrap(_indexing, "_take", [0])
    _wrap(_scatter, "_scatter_impl", [1])
    _wrap(_util, "_where", [1, 2])
    convolution = _convolution.conv_general_dilated_p
    for rules in (_ad.fancy_transposes, _ad.primitive_transposes):
        rule: Any = rules[convolution]
        of_input, of_kernel = rule.args
        rules[convolution] = functools.partial(rule.func, of_input, _with_zeros(of_kernel))
    _ad.primitive_jvps[reduce_prod_p] = _with_tangent(_ad.primitive_jvps[reduce_prod_p])


def _wrap(module: Any, name: str, operands: Sequence[int]) -> None:
    """Give a function of a module an empty result that depends on these operands."""
    function = getattr(module, name)

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if not _IS_ON.get():
            return function(*args, **kwargs)
        # A parameter in pieces is gathered here, once.
        given = [_as_array(x) if n in operands else x for n, x in enumerate(args)]
        result = function(*given, **kwargs)
        # A scatter of nothing returns its first operand.
        if not result.size or result is given[0]:
            for operand in operands:
                result = _append_nothing(result, given[operand])
        return result

    # Modules of JAX import a function by its name.
    for other in list_modules_of_jax():
        if getattr(other, name, None) is function:
            setattr(other, name, wrapped)


def _as_array(x: Any) -> Any:
    is_array = isinstance(x, jax.core.Tracer) or not hasattr(x, "__jax_array__")
    return x if is_array else jnp.asarray(x)


def _append_nothing(array: Any, of: Any) -> Any:
    """Return `array`; if `of` is traced, with none of its elements appended."""
    if not isinstance(of, jax.core.Tracer) or not jnp.issubdtype(of.dtype, jnp.inexact):
        return array
    rows = of[None] if not of.ndim else of
    nothing = jax.lax.slice_in_dim(rows, 0, 0).reshape(0).astype(array.dtype)
    return jax.lax.concatenate([array.reshape(array.size), nothing], 0).reshape(array.shape)


def _with_tangent(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Return a rule of a derivative that makes the tangent of nothing depend on its operand."""

    @functools.wraps(rule)
    def with_tangent(primals: Any, tangents: Any, **params: Any) -> Any:
        result, tangent = rule(primals, tangents, **params)
        [of] = tangents
        if primals[0].size or isinstance(of, _ad_util.Zero) or not _IS_ON.get():
            return result, tangent
        return result, _append_nothing(_ad_util.instantiate(tangent), of)

    return with_tangent


def _with_zeros(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Return a rule of a transpose that gives an array instead of a symbolic zero."""

    @functools.wraps(rule)
    def with_zeros(*args: Any, **kwargs: Any) -> Any:
        result = rule(*args, **kwargs)
        is_zero = isinstance(result, _ad_util.Zero)
        return _ad_util.instantiate(result) if is_zero and _IS_ON.get() else result

    return with_zeros
