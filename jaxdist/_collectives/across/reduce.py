"""Reduce of the values of all replicas, outside of a step: one function for each kind."""

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxdist._called import call_as, called, refuse, refuse_type
from jaxdist._collectives.across.kinds import Planned, Request, read_rows
from jaxdist._collectives.across.plain import (
    bring_all,
    choose_fetch,
    gather_whole,
    is_addressable,
    put_on_default_device,
    take_plain_array,
)
from jaxdist._collectives.across.together import check_sum, check_together
from jaxdist._collectives.reduction import (
    ReduceOp,
    check_numeric,
    finish_sum,
    prepare_summands,
    reduce_one_value,
    result_dtype,
)
from jaxdist._collectives.sums.tree import reduce_by_tree
from jaxdist._mesh import ReplicaMesh
from jaxdist._validate import show
from jaxdist._values import (
    PerReplica,
    Sharded,
    combine_pairwise,
    compute_auto,
    is_mirrored,
    refuse_leaked,
)
from jaxdist.errors import ShapeError

# Up to this many bytes, adding on the host takes less time than dispatching a compiled program.
HOST_BYTES = 64 * 1024


def plan_rows(request: Request, name: str, leaf: Any) -> Callable[[Any], Any]:
    """Plan the reduction of an array with the rows of all replicas."""
    layout, op = request.layout, request.op
    dims = None if request.axis is None else _parse_axis(name, request.axis)
    array, local = read_rows(request, name, leaf)
    check_numeric(name, array)
    on = () if not dims else _find_dims(name, jax.ShapeDtypeStruct(local, array.dtype), dims)
    shape, over = (layout.num_replicas, *local), (0, *(d + 1 for d in on))
    dtype = result_dtype(op, array.dtype)
    can_fetch = not isinstance(array, jax.Array) or is_addressable(array)
    in_tree = layout.num_virtual is not None
    # Sums on the host and on the devices follow the same rule for dtypes and means, so the size
    # only affects speed.
    small = array.size * array.dtype.itemsize <= HOST_BYTES
    if in_tree and isinstance(array, jax.core.Tracer):
        return lambda array: compute_auto(
            lambda x: _reduce_tree_on_devices(x, op, shape, over, dtype, layout), array
        )
    if in_tree or (can_fetch and (small or not isinstance(array, jax.Array))):
        # XLA divides differently from NumPy, so virtual replicas of several processes are
        # brought to each of them.
        fetch = choose_fetch(array, layout) if can_fetch else _fetch_from_all
        added = _accumulation_dtype(dtype)
        return lambda array: _reduce_on_host(op, fetch(array).reshape(shape), over, added, in_tree)
    return lambda array: take_plain_array(
        compute_auto(lambda x: _device_reduce(x, op, shape, over, dtype), array)
    )


def plan_one(request: Request, name: str, leaf: Any) -> Callable[[Any], Any]:
    """Plan the reduction of a value that is equal on all replicas."""
    layout, op = request.layout, request.op
    dims = None if request.axis is None else _parse_axis(name, request.axis)
    check_numeric(name, leaf)
    refuse_leaked(name, leaf)
    if dims is not None:
        on = _find_dims(name, jnp.asarray(leaf), dims)
        return lambda value: compute_auto(
            lambda x: _reduce_dims_of_one(op, jnp.asarray(x), on, layout.num_replicas), value
        )
    if op is ReduceOp.MEAN or layout.num_replicas == 1:
        return functools.partial(reduce_one_value, op)
    if is_mirrored(leaf, layout):
        return lambda value: compute_auto(
            lambda x: _multiply(jnp.asarray(x), layout.num_replicas), value
        )
    # R times zero is zero, so a sum of zeros is not ambiguous: for example a counter that no
    # replica has changed yet.
    if isinstance(leaf, (int, float, np.ndarray, np.generic)) and not np.any(leaf):
        return functools.partial(reduce_one_value, op)
    raise call_as(
        "Strategy.reduce(SUM, ...)",
        refuse,
        f"{name}, a {type(leaf).__name__} that is not distributed: it has one value, and the "
        f"strategy has {layout.num_replicas} replicas.",
        "Only a PerReplica, an array laid out over the replicas, or one that is replicated over "
        "the strategy's devices can be summed over replicas.",
        f"Multiply by {layout.num_replicas} if that is meant, use 'MEAN' (which returns it), "
        "or replicate it with jax.device_put(value, strategy.replicated_sharding).",
    )


def _reduce_dims_of_one(op: ReduceOp, array: jax.Array, on: tuple[int, ...], replicas: int) -> Any:
    """Reduce dims of an array that all replicas share."""
    if op is ReduceOp.MEAN:
        count = math.prod(array.shape[d] for d in on)
        shares = prepare_summands(op, array, count)
        # The mean over replicas of equal values is the value, so only the dims are reduced.
        total = jnp.sum(shares, axis=on, dtype=_accumulation_dtype(shares.dtype))
        return take_plain_array(finish_sum(op, total, array.dtype, count))
    return _multiply(jnp.sum(array, axis=on, dtype=result_dtype(op, array.dtype)), replicas)


def _multiply(array: jax.Array, replicas: int) -> jax.Array:
    """Return the sum of one array for each replica."""
    array = array.astype(result_dtype(ReduceOp.SUM, array.dtype))
    return take_plain_array(array * jnp.asarray(replicas, array.dtype))


def _fetch_from_all(array: jax.Array) -> np.ndarray:
    """Return an array over several processes in host memory, whole in each of them."""
    return np.asarray(take_plain_array(array))


reduce_rows = Planned(plan_rows)
reduce_one = Planned(plan_one)


def reduce_sharded(request: Request, name: str, leaf: Sharded) -> Any:
    """Reduce a sharded array.

    The replicas share one array, so there is nothing to add over them. With `axis`, these dims of
    the array are reduced.
    """
    check_numeric(name, leaf.array)
    whole = gather_whole(leaf)
    if request.axis is None:
        return reduce_one_value(request.op, whole)
    dims = find_reduced_dims(name, whole, request.axis)
    dtype = result_dtype(request.op, whole.dtype)
    reduce = jnp.mean if request.op is ReduceOp.MEAN else jnp.sum
    return reduce(whole.astype(dtype), axis=dims)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4, 5))
def _reduce_tree_on_devices(
    array: jax.Array,
    op: ReduceOp,
    shape: tuple[int, ...],
    over: tuple[int, ...],
    dtype: Any,
    layout: ReplicaMesh,
) -> jax.Array:
    """Reduce by the tree in one program over all devices."""

    def device(local: jax.Array) -> jax.Array:
        count = math.prod(shape[d] for d in over)
        rows = prepare_summands(op, local.reshape(layout.replicas_per_place, *shape[1:]), count)
        # `map`, not `vmap`: a batched sum may add the rows of one replica in another order.
        sums = jax.lax.map(
            lambda x: jnp.sum(x, [d - 1 for d in over[1:]], _accumulation_dtype(dtype)), rows
        )
        (total,) = reduce_by_tree([sums], jax.lax.add, layout.replica_axes, layout.num_places)
        return finish_sum(op, total, local.dtype, count)

    return jax.shard_map(
        device,
        mesh=layout.auto_mesh,
        in_specs=layout.replica_spec,
        out_specs=PartitionSpec(),
        axis_names=frozenset(layout.mesh.axis_names),
        check_vma=False,
    )(array)


def _accumulation_dtype(dtype: Any) -> np.dtype[Any]:
    """Return the dtype in which values of `dtype` are added: float32 for half precision."""
    is_half = jnp.issubdtype(dtype, jnp.floating) and np.dtype(dtype).itemsize < 4
    return np.dtype(np.float32) if is_half else np.dtype(dtype)


def _reduce_on_host(
    op: ReduceOp,
    rows: np.ndarray,
    over: tuple[int, ...],
    dtype: np.dtype[Any],
    in_tree: bool = False,
) -> jax.Array:
    """Return the sum or mean by NumPy, with the same accumulation dtype as XLA.

    With `in_tree`, the values of virtual replicas are added in the order of their tree. The result
    has the same bits on any number of devices. See `sums/tree.py`.
    """
    count = math.prod([rows.shape[d] for d in over])
    # XLA does not warn about overflow and nan, so NumPy must not either. The mean of no values is
    # nan.
    with np.errstate(all="ignore"):
        shares = prepare_summands(op, rows, count)
        total = np.add.reduce(shares, over[1:] if in_tree else over, dtype)
        # NumPy's own sum adds in another order.
        total = combine_pairwise(total, np.add) if in_tree else total
        whole = finish_sum(op, np.asarray(total), rows.dtype, count)
    return put_on_default_device(np.asarray(whole))


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _device_reduce(
    array: jax.Array, op: ReduceOp, shape: tuple[int, ...], over: tuple[int, ...], dtype: Any
) -> jax.Array:
    """Return the sum or mean of a global array by one compiled program."""
    count = math.prod(shape[d] for d in over)
    total = jnp.sum(
        prepare_summands(op, array.reshape(shape), count),
        axis=over,
        dtype=_accumulation_dtype(dtype),
    )
    return finish_sum(op, total, array.dtype, count)


def reduce_list(request: Request, name: str, value: PerReplica) -> Any:
    """Reduce values that are not placed yet, or that have different shapes."""
    op = request.op
    dims = None if request.axis is None else _parse_axis(name, request.axis)
    value = bring_all(request, name, value)
    check_reducible({name: value}, dims)
    for v in value.values:
        check_numeric(name, v)
    arrays = [np.asarray(v) for v in value.values]
    # NumPy reads Python floats as float64. The result has the dtype that JAX would give it.
    dtype = _accumulation_dtype(result_dtype(op, jax.dtypes.canonicalize_dtype(arrays[0].dtype)))
    over = [() if dims is None else _find_dims(name, a, dims) for a in arrays]
    if op is ReduceOp.SUM:
        call_as("Strategy.reduce", check_sum, name, value, dims)
    if dims is None:
        return _reduce_on_host(op, np.stack(arrays), (0,), dtype)
    # The shapes may differ on the reduced dims. A mean counts every element once, and not every
    # replica.
    count = sum(math.prod(a.shape[d] for d in on) for a, on in zip(arrays, over, strict=True))
    shares = [prepare_summands(op, a, count) for a in arrays]
    pairs = zip(shares, over, strict=True)
    with np.errstate(all="ignore"):
        sums = np.stack([np.add.reduce(a, axis=on, dtype=dtype) for a, on in pairs])
        total = np.add.reduce(sums, axis=0, dtype=dtype)
        whole = finish_sum(op, np.asarray(total), arrays[0].dtype, count)
    return put_on_default_device(np.asarray(whole))


def check_reducible(named: Mapping[str, Any], axis: Any) -> None:
    """Refuse values that `Strategy.reduce` cannot add over the replicas, and name all of them."""
    given = () if axis is None else axis if isinstance(axis, tuple) else (axis,)
    free = tuple(d.__index__() for d in given if hasattr(d, "__index__"))
    shown_axis = axis[0] if isinstance(axis, tuple) and len(axis) == 1 else axis
    remedy = "Reduce the other dims too, or pad them first."
    if axis is None:
        remedy = "Pass axis=0 to reduce the rows of all replicas together."
    check_together(named, free, remedy=remedy, arguments=f"(axis={shown_axis})")


@called("Strategy.reduce")
def _parse_axis(name: str, axis: Any) -> tuple[int, ...]:
    """Return `axis` of a reduction as a tuple of integers."""
    given: Sequence[Any] = axis if isinstance(axis, tuple) else (axis,)
    try:
        # `operator.index(True)` is 1. A bool is a mistake, for instance `keepdims=True` in the
        # wrong place.
        if any(isinstance(a, (bool, np.bool_)) for a in given):
            raise TypeError
        return tuple(operator.index(a) for a in given)
    except TypeError:
        raise refuse_type(
            f"axis={show(axis)}, for {name}.",
            "axis is None, an integer, or a tuple of integers.",
            "Pass axis=None to reduce over the replicas only, or axis=0 over their rows as well.",
        ) from None


def find_reduced_dims(name: str, array: Any, axis: Any) -> tuple[int, ...]:
    """Return `axis` of a reduction as dims of a local array, counted from the front, or raise."""
    return _find_dims(name, array, _parse_axis(name, axis))


def _find_dims(name: str, array: Any, dims: tuple[int, ...]) -> tuple[int, ...]:
    """Return dims of an array, counted from the front, without duplicates."""
    rank = len(array.shape)
    outside = [d for d in dims if not -rank <= d < rank]
    if outside:
        advice = "A scalar has no dims.\n\nPass axis=None."
        if rank:
            advice = f"axis is a dim of that value.\n\nPass one of {[*range(-rank, rank)]}."
        raise ShapeError(
            f"Strategy.reduce was given axis={outside[0]} for {name}, whose value on a replica is "
            f"{array.dtype}{list(array.shape)} of rank {rank}.\n\n{advice}"
        )
    return tuple(dict.fromkeys(d % rank for d in dims))
