"""Reducing and gathering arrays in pieces from outside a step: each is one array."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxdist._collectives.across.across import reduced_dims
from jaxdist._collectives.in_replica import gather_dim
from jaxdist._collectives.options.dtypes import check_numeric, result_dtype
from jaxdist._collectives.options.reduce_op import ReduceOp
from jaxdist._values import Sharded


def reduce_sharded(op: ReduceOp, name: str, value: Sharded, axis: Any) -> Any:
    """`Strategy.reduce`: each element is there once, so the replicas have nothing to add.

    With `axis`, these dims of the one array are reduced.
    """
    check_numeric("Strategy.reduce", name, value.array)
    whole = _here(value)
    if axis is None:
        return whole
    dims = reduced_dims(name, whole, axis)
    dtype = result_dtype(op, whole.dtype)
    reduce = jnp.mean if op is ReduceOp.MEAN else jnp.sum
    return reduce(whole.astype(dtype), axis=dims)


def gather_sharded(name: str, value: Sharded, axis: int) -> Any:
    """`Strategy.gather`: the one array, whatever the axis."""
    gather_dim("Strategy.gather", name, value.array, axis)
    return _here(value)


def _here(value: Sharded) -> Any:
    """The one array, tied to no device where this process has all of it."""
    whole = value.whole()
    return jnp.asarray(np.asarray(whole)) if whole.is_fully_addressable else whole
