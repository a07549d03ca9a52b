"""Reduce and gather of the values of all replicas, outside of a step."""

import functools
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxdist import _compat
from jaxdist._collectives.across.together import check_sum, check_together
from jaxdist._collectives.in_replica import gather_dim
from jaxdist._collectives.options.dtypes import (
    check_numeric,
    check_supported,
    finish_sum,
    prepare_summands,
    result_dtype,
)
from jaxdist._collectives.options.reduce_op import ReduceOp
from jaxdist._collectives.sums.tree import reduce_by_tree
from jaxdist._mesh import ReplicaMesh
from jaxdist._validate import show
from jaxdist._values import (
    Form,
    Kind,
    PerReplica,
    check_global,
    is_mirrored,
    origin_of,
    place_per_replica,
    placement_of,
    refuse_leaked,
)
from jaxdist.errors import ArgumentError, ArgumentTypeError, ReplicaValueError, ShapeError

# Up to this many bytes, adding on the host takes less time than dispatching a compiled program.
HOST_BYTES = 64 * 1024


def reduce_across(op: ReduceOp, name: str, value: Any, axis: Any, layout: ReplicaMesh) -> Any:
    """Return `Strategy.reduce` of one leaf."""
    dims = None if axis is None else _parse_axis(name, axis)
    if isinstance(value, PerReplica):
        return _reduce_per_replica(op, name, value, dims, layout)
    check_numeric("Strategy.reduce", name, value)
    kind = placement_of(value, layout).kind if isinstance(value, jax.Array) else None
    if kind is Kind.PER_REPLICA:
        return _reduce_per_replica(op, name, PerReplica.of_global(value), dims, layout)
    return _reduce_replicated(op, name, value, dims, layout)


def _reduce_replicated(
    op: ReduceOp, name: str, value: Any, dims: tuple[int, ...] | None, layout: ReplicaMesh
) -> Any:
    """Reduce a value that is equal on all replicas."""
    refuse_leaked("Strategy.reduce", name, value)
    if dims is not None:
        array = jnp.asarray(value)
        on = _find_dims(name, array, dims)
        if op is ReduceOp.MEAN:
            count = math.prod(array.shape[d] for d in on)
            shares = prepare_summands(op, array, count)
            # The mean over replicas of equal values is the value, so only the dims are reduced.
            total = jnp.sum(shares, axis=on, dtype=_accumulation_dtype(shares.dtype))
            return take_plain_array(finish_sum(op, total, array.dtype, count))
        total = jnp.sum(array, axis=on, dtype=result_dtype(op, array.dtype))
        return take_plain_array(total * jnp.asarray(layout.num_replicas, total.dtype))
    if op is ReduceOp.MEAN or layout.num_replicas == 1:
        return value
    if is_mirrored(value, layout):
        array = jnp.asarray(value)
        array = array.astype(result_dtype(op, array.dtype))
        return take_plain_array(array * jnp.asarray(layout.num_replicas, array.dtype))
    # R times zero is zero, so a sum of zeros is not ambiguous: for example a counter that no
    # replica has changed yet.
    if isinstance(value, (int, float, np.ndarray, np.generic)) and not np.any(value):
        return value
    raise ArgumentError(
        f"Strategy.reduce(SUM, ...) was given {name}, a {type(value).__name__} that is not "
        f"distributed: it has one value, and the strategy has {layout.num_replicas} replicas.\n\n"
        "Only a PerReplica, an array laid out over the replicas, or one that is replicated over "
        "the strategy's devices can be summed over replicas.\n\n"
        f"Multiply by {layout.num_replicas} if that is meant, use 'MEAN' (which gives it back), or "
        "replicate it with jax.device_put(value, strategy.replicated_sharding)."
    )


def _reduce_per_replica(
    op: ReduceOp, name: str, value: PerReplica, dims: tuple[int, ...] | None, layout: ReplicaMesh
) -> Any:
    """Reduce a value that each replica has its own part of."""
    # Traced values cannot be added on the host, so they become one global array first.
    if not value.is_global and _is_traced(value):
        for part in value.values:
            refuse_leaked("Strategy.reduce", name, part)
        value = place_per_replica(name, value, layout)
    if not value.is_global:
        return _reduce_list(op, name, value, dims, layout)
    array = check_global(name, value, layout)
    check_numeric("Strategy.reduce", name, array)
    local = (array.shape[0] // layout.num_replicas, *array.shape[1:])
    scalars = value.form is Form.SCALARS
    on = None if dims is None else _find_local_dims(name, array, () if scalars else local, dims)
    shape = (layout.num_replicas,) if scalars else (layout.num_replicas, *local)
    over = (0,) if on is None else (0, *(d + 1 for d in on))
    dtype = result_dtype(op, array.dtype)
    if layout.num_virtual is not None:
        return _reduce_virtual(op, array, shape, over, dtype, layout)
    # Sums on the host and on the devices follow the same rule for dtypes and means, so the size
    # decides about speed only.
    small = array.size * array.dtype.itemsize <= HOST_BYTES
    if not isinstance(array, jax.Array) or (small and _is_addressable(array)):
        rows = _fetch_rows(array, layout).reshape(shape)
        return _put_on_default_device(_host_reduce(op, rows, over, dtype))
    result = _device_reduce(array, op, shape, over, dtype)
    # `take_plain_array` reads buffers, and a tracer has none.
    return result if isinstance(result, jax.core.Tracer) else take_plain_array(result)


def _reduce_virtual(
    op: ReduceOp,
    array: Any,
    shape: tuple[int, ...],
    over: tuple[int, ...],
    dtype: Any,
    layout: ReplicaMesh,
) -> Any:
    """Reduce the values of virtual replicas in the order of their tree.

    The result has the same bits on any number of devices. See `sums/tree.py`.
    """
    count = math.prod(shape[d] for d in over)
    if isinstance(array, jax.core.Tracer) or (
        isinstance(array, jax.Array) and not _is_addressable(array)
    ):
        return _reduce_tree_on_devices(array, op, shape, over, dtype, layout)
    rows = np.asarray(array).reshape(shape)
    total = _host_sum(prepare_summands(op, rows, count), over[1:], dtype)
    with np.errstate(all="ignore"):
        # The number of virtual replicas is a power of two. NumPy's own sum adds in another order.
        while total.shape[0] > 1:
            total = np.add(total[0::2], total[1::2])
    return _put_on_default_device(_finish_on_host(op, total[0], count, rows.dtype))


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
        whole: jax.Array = finish_sum(op, total, local.dtype, count)
        return whole

    whole: jax.Array = jax.shard_map(
        device,
        mesh=layout.mesh,
        in_specs=layout.replica_spec,
        out_specs=PartitionSpec(),
        axis_names=frozenset(layout.mesh.axis_names),
        check_vma=False,
    )(array)
    return whole


def _is_traced(value: PerReplica) -> bool:
    """Whether any value of the replicas is a tracer."""
    return any(isinstance(v, jax.core.Tracer) for v in value.values)


def _fetch_rows(array: Any, layout: ReplicaMesh) -> np.ndarray:
    """Return a global array as a NumPy array, shard by shard where each shard is one replica.

    `np.asarray` gives the same result for every layout, but takes twice the time.

    `np.asarray` does the same for every layout, in twice the time.
    """
    if not isinstance(array, jax.Array) or not layout.has_shard_per_replica:
        return np.asarray(array)
    if array.sharding != layout.per_replica:
        return np.asarray(array)
    return np.concatenate([np.asarray(piece) for piece in _compat.get_shards(array)])


def _is_addressable(array: jax.Array) -> bool:
    """Whether this process can read the whole array now."""
    return not isinstance(array, jax.core.Tracer) and array.is_fully_addressable


def _accumulation_dtype(dtype: Any) -> np.dtype[Any]:
    """Return the dtype in which values of `dtype` are added: float32 for half precision."""
    is_half = jnp.issubdtype(dtype, jnp.floating) and np.dtype(dtype).itemsize < 4
    return np.dtype(np.float32) if is_half else np.dtype(dtype)


def _host_reduce(op: ReduceOp, rows: np.ndarray, over: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return the sum or mean by NumPy, with the same accumulation dtype as XLA."""
    count = math.prod(rows.shape[d] for d in over)
    return _finish_on_host(
        op, _host_sum(prepare_summands(op, rows, count), over, dtype), count, rows.dtype
    )


def _host_sum(shares: np.ndarray, over: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return the sum over dims by NumPy."""
    with np.errstate(all="ignore"):
        # XLA does not warn about overflow and nan, so NumPy must not either.
        return np.asarray(np.add.reduce(shares, axis=over, dtype=_accumulation_dtype(dtype)))


def _finish_on_host(op: ReduceOp, total: np.ndarray, count: int, dtype: Any) -> np.ndarray:
    """Return the reduction from a sum of values of `dtype`; the mean of no values is nan."""
    with np.errstate(all="ignore"):
        return np.asarray(finish_sum(op, total, dtype, count))


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
    result: jax.Array = finish_sum(op, total, array.dtype, count)
    return result


def _reduce_list(
    op: ReduceOp, name: str, value: PerReplica, dims: tuple[int, ...] | None, layout: ReplicaMesh
) -> Any:
    """Reduce a list of values that are not placed yet, or that have different shapes."""
    _check_count(name, value, layout, "Strategy.reduce")
    check_reducible({name: value}, dims)
    for v in value.values:
        check_numeric("Strategy.reduce", name, v)
    arrays = [np.asarray(v) for v in value.values]
    # NumPy reads Python floats as float64. The result has the dtype that JAX would give it.
    dtype = result_dtype(op, jax.dtypes.canonicalize_dtype(arrays[0].dtype))
    if op is ReduceOp.SUM:
        check_sum(name, value, dims)
    if dims is None:
        return _put_on_default_device(_host_reduce(op, np.stack(arrays), (0,), dtype))
    over = [_find_dims(name, a, dims) for a in arrays]
    # The shapes may differ on the reduced dims. A mean counts every element once, and not every
    # replica.
    count = sum(math.prod(a.shape[d] for d in on) for a, on in zip(arrays, over, strict=True))
    pairs = zip(arrays, over, strict=True)
    sums = np.stack([_host_sum(prepare_summands(op, a, count), on, dtype) for a, on in pairs])
    return _put_on_default_device(
        _finish_on_host(op, _host_sum(sums, (0,), dtype), count, arrays[0].dtype)
    )


def check_reducible(named: Mapping[str, Any], axis: Any) -> None:
    """Refuse values that `Strategy.reduce` cannot add over the replicas, and name all of them."""
    given = () if axis is None else axis if isinstance(axis, tuple) else (axis,)
    free = tuple(d.__index__() for d in given if hasattr(d, "__index__"))
    shown_axis = axis[0] if isinstance(axis, tuple) and len(axis) == 1 else axis
    remedy = "Reduce the other dims too, or pad them first."
    if axis is None:
        remedy = "Give axis=0 to reduce the rows of all replicas together."
    check_together(f"Strategy.reduce(axis={shown_axis})", named, free, remedy=remedy)


def gather_across(
    name: str, value: Any, axis: int, layout: ReplicaMesh, caller: str = "Strategy.gather"
) -> Any:
    """Return `Strategy.gather` of one leaf."""
    if not isinstance(value, PerReplica):
        refuse_leaked(caller, name, value)
        if isinstance(value, jax.Array):
            placed = placement_of(value, layout)
            if placed.kind is Kind.PER_REPLICA:
                return gather_across(name, PerReplica.of_global(value), axis, layout, caller)
            is_traced = isinstance(value, jax.core.Tracer)
            # The sharding of a tracer is unknown. Only a tracer that comes from an argument of the
            # step has a known origin, and with it a known placement.
            is_known = not is_traced or origin_of(value) is not None
            if layout.num_replicas > 1 and is_known and is_mirrored(value, layout):
                dim = gather_dim(caller, name, value, axis)
                if is_traced:
                    return jnp.concatenate([value] * layout.num_replicas, axis=dim)
                # Every replica has this value, so the gathered array repeats it once for each.
                copies = [_to_host(value)] * layout.num_replicas
                return _put_on_default_device(np.concatenate(copies, axis=dim), like=value)
        return value
    if not value.is_global and _is_traced(value):
        for part in value.values:
            refuse_leaked(caller, name, part)
        value = place_per_replica(name, value, layout)
    if not value.is_global:
        return _gather_list(name, value, axis, layout, caller)
    array = check_global(name, value, layout)
    scalars = value.form is Form.SCALARS
    local = () if scalars else (array.shape[0] // layout.num_replicas, *array.shape[1:])
    # The common case: it skips the checks of `gather_dim`, which need a shape struct.
    if type(axis) is int and 0 <= axis < len(local):
        dim = axis
    else:
        dim = gather_dim(caller, name, jax.ShapeDtypeStruct(local, array.dtype), axis)
    if isinstance(array, jax.core.Tracer):
        return _concatenate_parts(array, dim, layout.num_replicas)
    if isinstance(array, jax.Array) and not _is_addressable(array):
        # Several processes: no process has all rows, so a program moves them.
        moved = jax.jit(_concatenate_parts, static_argnums=(1, 2), out_shardings=layout.replicated)
        return moved(array, dim, layout.num_replicas)
    # Random keys have a dtype of JAX that NumPy cannot read.
    is_plain = isinstance(array.dtype, np.dtype)
    held = _fetch_rows(array, layout) if is_plain else _to_host(array)
    if dim:
        # The rows of all replicas follow each other on dim 0 of a global array.
        held = np.concatenate(np.split(held, layout.num_replicas), axis=dim)
    return _put_on_default_device(held, like=array)


def _concatenate_parts(array: jax.Array, dim: int, num_replicas: int) -> jax.Array:
    """Concatenate the replicas' parts of a global array on `dim`."""
    if not dim:
        return array
    return jnp.concatenate(jnp.split(array, num_replicas), axis=dim)


def _gather_list(name: str, value: PerReplica, axis: int, layout: ReplicaMesh, caller: str) -> Any:
    """Gather a list of values that are not placed yet, or that have different shapes."""
    _check_count(name, value, layout, caller)
    for v in value.values:
        check_supported(f"{caller} cannot gather {name}", v)
    arrays = [v if hasattr(v, "dtype") else np.asarray(v) for v in value.values]
    dim = min(gather_dim(caller, name, a, axis) for a in arrays)
    check_gatherable(caller, {name: value}, axis)
    return _put_on_default_device(
        np.concatenate([_to_host(a) for a in arrays], axis=dim), like=arrays[0]
    )


def check_gatherable(caller: str, named: Mapping[str, Any], axis: Any) -> None:
    """Refuse values that cannot be concatenated, and name all of them."""
    free = (axis.__index__(),) if hasattr(axis, "__index__") else ()
    remedy = "Gather on the dim that differs, or pad the others first."
    check_together(f"{caller}(axis={axis})", named, free, remedy=remedy)


def _check_count(name: str, value: PerReplica, layout: ReplicaMesh, caller: str) -> None:
    """Refuse a `PerReplica` with a number of values that the strategy does not have."""
    if len(value.values) != len(layout.local_replicas):
        raise ReplicaValueError(
            f"{caller} was given {name}, a PerReplica with {len(value.values)} values, and the "
            "strategy has "
            f"{len(layout.local_replicas)} replicas in this process.\n\n"
            "A PerReplica has one value for each replica of the strategy that made it.\n\n"
            "Use the strategy that made the value."
        )


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
        raise ArgumentTypeError(
            f"Strategy.reduce was given axis={show(axis)}, for {name}.\n\n"
            "axis is None, an integer, or a tuple of integers.\n\n"
            "Pass axis=None to reduce over the replicas only, or axis=0 over their rows as well."
        ) from None


def find_reduced_dims(name: str, array: Any, axis: Any) -> tuple[int, ...]:
    """Return `axis` of a reduction as dims of a local array, counted from the front, or raise."""
    return _find_dims(name, array, _parse_axis(name, axis))


def _find_dims(name: str, array: Any, dims: tuple[int, ...]) -> tuple[int, ...]:
    """Return dims of an array, counted from the front."""
    return _find_local_dims(name, array, tuple(array.shape), dims)


def _find_local_dims(
    name: str, array: Any, local: tuple[int, ...], dims: tuple[int, ...]
) -> tuple[int, ...]:
    """Return dims of the local shape, counted from the front, without duplicates."""
    rank = len(local)
    outside = [d for d in dims if not -rank <= d < rank]
    if outside:
        advice = "A scalar has no dims.\n\nPass axis=None."
        if rank:
            advice = f"axis is a dim of that value.\n\nPass one of {[*range(-rank, rank)]}."
        raise ShapeError(
            f"Strategy.reduce was given axis={outside[0]} for {name}, whose value on a replica is "
            f"{array.dtype}{list(local)} of rank {rank}.\n\n{advice}"
        )
    found = tuple(dict.fromkeys(d % rank for d in dims))
    return found


def _to_host(array: Any) -> np.ndarray:
    """Return an array as a NumPy array; for random keys, their bits."""
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return np.asarray(array)


def _put_on_default_device(array: np.ndarray, like: Any = None) -> jax.Array:
    """Return an uncommitted array on this process's default device.

    It has random keys if `like` has.
    """
    # `put_uncommitted` skips JAX's conversion of dtypes, which float64 needs where x64 is off.
    placed = _compat.put_uncommitted(array) if _is_kept_by_jax(array.dtype) else jnp.asarray(array)
    if like is not None and not isinstance(like.dtype, np.dtype):
        return jax.random.wrap_key_data(placed, impl=jax.random.key_impl(like))
    return placed


def take_plain_array(array: jax.Array) -> jax.Array:
    """Return a result on the mesh as one uncommitted array: the shard on its first device."""
    if isinstance(array, jax.core.Tracer) or not array.is_fully_addressable:
        return array
    if not array.is_fully_replicated:
        return _put_on_default_device(np.asarray(array))
    # A committed array could not be combined with arrays on other devices.
    return _compat.make_uncommitted(array.addressable_data(0))


def _is_kept_by_jax(dtype: np.dtype[Any]) -> bool:
    """Whether JAX keeps this dtype as it is; 64 bits depend on `jax_enable_x64`."""
    return dtype.itemsize < 8 or dtype == jax.dtypes.canonicalize_dtype(dtype)
