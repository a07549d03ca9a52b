"""Means of Flax's normalization layers over replicas that may have different numbers of rows.

Waits for Flax to weigh the statistics of devices by their numbers of values: a layer with
`axis_name` gives each device the same weight.
"""

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

_WEIGHS: ContextVar[bool] = ContextVar("jaxdist_weighs_statistics", default=False)
_COMPUTE = "_compute_stats"

# The lines that JAX names in programs outside of steps are those of the user's code.
_source_info.register_exclusion(__file__)


def weigh_batch_statistics() -> AbstractContextManager[None]:
    """Weigh the statistics of each device by its number of values in the block.

    Layers without `axis_name` do not change. A device without rows takes part with the weight 0.
    """
    for module in (_nnx, _linen):
        original: Any = getattr(module, _COMPUTE)
        if not getattr(original, "of_jaxdist", False):
            setattr(module, _COMPUTE, _wrap(original))
    return set_in_block(_WEIGHS, True)


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
        **kwargs: Any,
    ) -> Any:
        given = {"use_mean": use_mean, "use_fast_variance": use_fast_variance, **kwargs}
        if not _WEIGHS.get() or axis_name is None or not use_mean or jnp.iscomplexobj(x):
            return original(x, axes, dtype, axis_name, axis_index_groups, **given)

        def add_up(*values: jax.Array) -> list[jax.Array]:
            # A number of Python would be summed as if all devices had it.
            counts = jnp.full(values[0].shape, count, values[0].dtype)
            weighted = jnp.stack([*(v * count for v in values), counts])
            *sums, total = jax.lax.psum(weighted, axis_name, axis_index_groups=axis_index_groups)
            return [s / total for s in sums]

        reduced = [axes] if isinstance(axes, int) else [*axes]
        count = math.prod(x.shape[axis] for axis in reduced)
        if count:
            mean, variance = original(x, axes, dtype, None, None, **given)
        else:
            # A mean over nothing is nan, and nan times 0 is nan.
            kind = jnp.promote_types(x.dtype if dtype is None else dtype, jnp.float32)
            mean = variance = jnp.sum(x.astype(kind), tuple(reduced))
        if use_fast_variance:
            whole, square = add_up(mean, variance + jnp.square(mean))
            return whole, jnp.maximum(0.0, square - jnp.square(whole))
        (whole,) = add_up(mean)
        (spread,) = add_up(variance + jnp.square(mean - whole))
        return whole, spread

    compute_stats.of_jaxdist = True  # type: ignore[attr-defined]
    return compute_stats
