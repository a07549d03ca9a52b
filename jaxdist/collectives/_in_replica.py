"""Collectives as seen from inside a step: every replica calls them with its own value."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jaxdist._typing import AxisNames, PyTree
from jaxdist.collectives._dtypes import check_numeric, result_dtype
from jaxdist.collectives._mark import assume_replicated
from jaxdist.collectives._packs import summed_in_packs
from jaxdist.collectives._reduce_op import ReduceOp
from jaxdist.collectives._uneven_gather import current_log, uneven_all_gather
from jaxdist.errors import ShapeError

T = TypeVar("T")


def all_reduce(
    caller: str,
    op: ReduceOp,
    value: PyTree,
    axes: AxisNames,
    num_replicas: int,
    bytes_per_pack: int = 0,
) -> PyTree:
    """Sum or mean over the replicas of every leaf: one `psum`, or one for each pack."""
    leaves, treedef = jax.tree.flatten_with_path(value)
    arrays = [_reducible(caller, op, path, leaf) for path, leaf in leaves]
    if not arrays:
        return value
    # XLA keeps an all-reduce of one replica on CPU.
    sums = summed(arrays, axes, bytes_per_pack) if num_replicas > 1 else arrays
    if op is ReduceOp.MEAN:
        sums = [s / num_replicas for s in sums]
    return jax.tree.unflatten(treedef, sums)


def _reducible(caller: str, op: ReduceOp, path: Any, leaf: Any) -> Any:
    check_numeric(caller, "value" + jax.tree_util.keystr(path), leaf)
    array = jnp.asarray(leaf)
    return array.astype(result_dtype(op, array.dtype))


def summed(value: T, axes: AxisNames, bytes_per_pack: int = 0) -> T:
    """The sum over the replicas of every array of a pytree."""
    leaves, treedef = jax.tree.flatten(jax.tree.map(_opaque, value))
    if bytes_per_pack:
        sums = summed_in_packs(leaves, axes, bytes_per_pack)
    else:
        sums = jax.lax.psum(leaves, axes)
    whole: T = jax.tree.unflatten(treedef, sums)
    return whole


def _opaque(array: Any) -> Any:
    """XLA aborts the process when it sees that what is summed is a complex constant."""
    is_complex = jnp.issubdtype(array.dtype, jnp.complexfloating)
    return jax.lax.optimization_barrier(array) if is_complex else array


def all_gather(caller: str, value: PyTree, axis: int, axes: AxisNames) -> PyTree:
    """Every leaf of all replicas, concatenated on `axis` in replica order."""

    def gather(path: Any, leaf: Any) -> Any:
        array = jnp.asarray(leaf)
        dim = gather_dim(caller, "value" + jax.tree_util.keystr(path), array, axis)
        return gathered(array, dim, axes)

    return jax.tree.map_with_path(gather, value)


def gathered(array: jax.Array, dim: int, axes: AxisNames) -> jax.Array:
    """`array` of all replicas, concatenated on `dim`."""
    log = current_log()
    if log is not None:
        return uneven_all_gather(array, dim, axes, log.next(array.shape[dim]))
    if not array.size:
        # JAX cannot lower an all-gather of nothing.
        return assume_replicated(jnp.concatenate([array] * jax.lax.axis_size(axes), axis=dim))
    whole: jax.Array = jax.lax.all_gather(array, axes, axis=dim, tiled=True)
    return whole


def gather_dim(caller: str, name: str, array: Any, axis: Any) -> int:
    """`axis` as a dim of `array` counted from the front, or a named error."""
    if isinstance(axis, bool) or not hasattr(axis, "__index__"):
        raise ShapeError(
            f"{caller} was given axis={axis!r}, and axis is one integer.\n\n"
            "Pass axis=0 to concatenate rows."
        )
    dim = int(axis.__index__())
    if not array.ndim:
        raise ShapeError(
            f"{caller} cannot concatenate {name}: it is a scalar, {array.dtype}[].\n\n"
            "Only arrays with a dim can be concatenated; give it one with value[None], or use "
            "reduce."
        )
    if not -array.ndim <= dim < array.ndim:
        raise ShapeError(
            f"{caller} was given axis={dim}, and {name} is {array.dtype}{list(array.shape)} of "
            f"rank {array.ndim}.\n\n"
            f"axis must lie in {list(range(-array.ndim, array.ndim))}."
        )
    return dim % array.ndim
