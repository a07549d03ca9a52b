"""Means of Flax's normalization layers over replicas that may have different numbers of rows.

Waits for Flax to weigh the statistics of devices by their numbers of values: a layer with
`axis_name` gives each device the same weight.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from flax.linen import normalization as _linen
from flax.nnx.nn import normalization as _nnx
from jax._src import source_info_util as _source_info

from jaxdist._compat.tracing import set_in_block
from jaxdist.errors import ShapeError

_COMPUTE = "_compute_stats"


@dataclasses.dataclass(frozen=True)
class _Rows:
    """The rows of this device."""

    is_even: bool = False  # whether all devices have as many
    is_real: jax.Array | None = None  # None: all of them
    axes: tuple[str, ...] = ()  # those over which other devices have other rows


_ROWS: ContextVar[_Rows | None] = ContextVar("jaxdist_rows_of_statistics", default=None)

# The lines that JAX names in programs outside of steps are those of the user's code.
_source_info.register_exclusion(__file__)


def weigh_batch_statistics(*, has_equal_rows: bool) -> AbstractContextManager[None]:
    """Weigh the statistics of each device by its number of values in the block.

    Layers without `axis_name` do not change. A device without rows counts with weight 0.

    Args:
        has_equal_rows: Whether all devices have equally many rows. Then only a layer that is given
            a mask changes.
    """
    return _use_rows(_Rows(is_even=has_equal_rows))


def leave_out_padding(is_real: jax.Array, axes: tuple[str, ...]) -> AbstractContextManager[None]:
    """Leave padding out of the statistics of batches in the block.

    Like `weigh_batch_statistics`, where the rows of a device are padded to those of the others. A
    device that has only padding uses the mean of the statistics of the others.

    Args:
        is_real: True for real rows, False for padding, `[rows]`.
        axes: The axes over which other devices have other rows.
    """
    return _use_rows(_Rows(is_real=is_real, axes=axes))


def _use_rows(rows: _Rows) -> AbstractContextManager[None]:
    _install()
    return set_in_block(_ROWS, rows)


@functools.cache
def _install() -> None:
    for module in (_nnx, _linen):
        setattr(module, _COMPUTE, _wrap(getattr(module, _COMPUTE)))


def _wrap(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def compute_stats(
        x: Any,
        axes: Any,
        dtype: Any,
        axis_name: Any = None,
        axis_index_groups: Any = None,
        use_mean: bool = True,
        use_fast_variance: bool = True,
        mask: Any = None,
        **kwargs: Any,
    ) -> Any:
        given = {"use_mean": use_mean, "use_fast_variance": use_fast_variance, **kwargs}
        rows = _ROWS.get()
        reduced = [axes] if isinstance(axes, int) else [*axes]
        is_of_rows = any(axis % x.ndim == 0 for axis in reduced)
        is_real = rows.is_real if rows is not None and is_of_rows else None
        # Over equally many values on each device, the mean of Flax is that of all of them.
        is_uneven = rows is not None and (mask is not None or not rows.is_even)
        weighs = is_real is not None or (axis_name is not None and is_uneven)
        if rows is None or not weighs or not use_mean or jnp.iscomplexobj(x):
            return original(x, axes, dtype, axis_name, axis_index_groups, mask=mask, **given)
        count: Any = math.prod(x.shape[axis] for axis in reduced)
        if is_real is not None:
            mask = _join_masks(x, mask, is_real)
        if mask is not None and count:
            shape = jnp.broadcast_shapes(mask.shape, x.shape)
            count = jnp.broadcast_to(mask, shape).sum(tuple(reduced), dtype=jnp.float32)
            # Without any value, the statistics of all of them stay finite, and have no weight.
            mask = mask | ~jnp.any(mask)
        if x.size:
            mean, variance = original(x, axes, dtype, None, None, mask=mask, **given)
        else:
            # A mean over nothing is nan, and nan times 0 is nan.
            kind = jnp.promote_types(x.dtype if dtype is None else dtype, jnp.float32)
            mean = variance = jnp.sum(x.astype(kind), tuple(reduced))

        def add_up(*values: jax.Array, over: Any, groups: Any = None) -> list[jax.Array]:
            # A Python number would be summed as if all devices had it.
            counts = jnp.broadcast_to(count, values[0].shape).astype(values[0].dtype)
            weighted = jnp.stack([*(v * counts for v in values), counts])
            *sums, total = jax.lax.psum(weighted, over, axis_index_groups=groups)
            return [s / total for s in sums]

        if axis_name is None:
            has_rows = jnp.broadcast_to(count, mean.shape) > 0
            others = jax.lax.stop_gradient(add_up(mean, variance, over=rows.axes))
            return tuple(
                jnp.where(has_rows, own, other)
                for own, other in zip((mean, variance), others, strict=True)
            )
        add_up = functools.partial(add_up, over=axis_name, groups=axis_index_groups)
        if use_fast_variance:
            whole, square = add_up(mean, variance + jnp.square(mean))
            return whole, jnp.maximum(0.0, square - jnp.square(whole))
        (whole,) = add_up(mean)
        (spread,) = add_up(variance + jnp.square(mean - whole))
        return whole, spread

    return compute_stats


def _join_masks(x: Any, mask: Any, is_real: jax.Array) -> Any:
    """Return a mask of the values of `x`, whose dim 0 is that of the rows."""
    if x.shape[0] != is_real.shape[0]:
        raise ShapeError(
            f"A layer computes statistics of {x.dtype}{list(x.shape)} over dim 0, and this replica "
            f"has {is_real.shape[0]} rows, with padding.\n\n"
            "Padding counts in no statistic, and a dim that other dims were folded into does not "
            "say which values are padding.\n\n"
            "Leave the rows in dim 0 (BatchNorm takes [rows, ..., features]), or pass batches that "
            "all replicas divide evenly: a batch size that divides the number of examples."
        )
    own = is_real.reshape(-1, *[1] * (x.ndim - 1))
    return own if mask is None else own & mask.astype(bool)
