"""Which dtype a reduction gives."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.collectives._reduce_op import ReduceOp
from jaxdist.errors import ArgumentTypeError


def result_dtype(op: ReduceOp, dtype: Any) -> Any:
    """Dtype of a reduction over replicas.

    Floats and complex keep theirs. Booleans are counted (int32). The mean of integers or
    booleans is true division into JAX's default float: float32, or float64 with x64 on.
    """
    if op is ReduceOp.MEAN and not jnp.issubdtype(dtype, np.inexact):
        return jnp.result_type(float)
    if dtype == np.bool_:
        return np.dtype(np.int32)
    return dtype


def check_numeric(caller: str, name: str, leaf: Any) -> None:
    """Refuse what has no sum: typed random keys, strings, objects."""
    dtype = getattr(leaf, "dtype", None)
    if dtype is None:
        dtype = np.asarray(leaf).dtype
    extended = jax.dtypes.issubdtype(dtype, jax.dtypes.extended)
    if extended or not (jnp.issubdtype(dtype, np.number) or dtype == np.bool_):
        raise ArgumentTypeError(
            f"{caller} cannot reduce {name}: it is {type(leaf).__name__} of dtype {dtype}.\n\n"
            "Only numbers and booleans have a sum or a mean.\n\n"
            "Take it out of the structure, or gather it instead."
        )
