"""Reduce and gather of sharded arrays outside of a step: each is one array for all replicas."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxdist._collectives.across.across import find_reduced_dims
from jaxdist._collectives.in_replica import gather_dim
from jaxdist._collectives.options.dtypes import check_numeric, result_dtype
from jaxdist._collectives.options.reduce_op import ReduceOp
from jaxdist._values import Sharded


def reduce_sharded(op: ReduceOp, name: str, value: Sharded, axis: Any) -> Any:
    """Return `Strategy.reduce` of a sharded array.

    The replicas share one array, so there is nothing to add over them. With `axis`, these dims of
    the array are reduced.
    """
    check_numeric("Strategy.reduce", name, value.array)
    whole = _gather_whole(value)
    if axis is None:
        return whole
    dims = find_reduced_dims(name, whole, axis)
    dtype = result_dtype(op, whole.dtype)
    reduce = jnp.mean if op is ReduceOp.MEAN else jnp.sum
    return reduce(whole.astype(dtype), axis=dims)


def gather_sharded(name: str, value: Sharded, axis: int) -> Any:
    """Return `Strategy.gather` of a sharded array: the whole array, for any axis."""
    # The axis has no effect, but a wrong one must fail as it does for other values.
    gather_dim("Strategy.gather", name, value.array, axis)
    return _gather_whole(value)


def _gather_whole(value: Sharded) -> Any:
    """Return the whole array, uncommitted if this process can read all of it."""
    # Through the host: the shards are on several devices, and an uncommitted array has one buffer.
    whole = value.whole()
    return jnp.asarray(np.asarray(whole)) if whole.is_fully_addressable else whole
