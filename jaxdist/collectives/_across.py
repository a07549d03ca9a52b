"""Reducing and gathering values of all replicas from outside a step."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist import _compat
from jaxdist.collectives._dtypes import check_numeric, result_dtype
from jaxdist.collectives._in_replica import gather_dim
from jaxdist.collectives._reduce_op import ReduceOp
from jaxdist.errors import ArgumentError, ArgumentTypeError, ReplicaValueError, ShapeError
from jaxdist.mesh import ReplicaMesh
from jaxdist.values import Form, Kind, PerReplica, placement_of

# Up to this size the host adds the local values faster than a program on the devices can start.
HOST_BYTES = 64 * 1024


def reduce_across(op: ReduceOp, name: str, value: Any, axis: Any, layout: ReplicaMesh) -> Any:
    """`Strategy.reduce` of one leaf."""
    dims = None if axis is None else _dims(name, axis)
    if isinstance(value, PerReplica):
        return _reduce_per_replica(op, name, value, dims, layout)
    check_numeric("Strategy.reduce", name, value)
    kind = placement_of(value, layout).kind if isinstance(value, jax.Array) else None
    if kind is Kind.PER_REPLICA:
        return _reduce_per_replica(op, name, PerReplica.of_global(value), dims, layout)
    return _reduce_same(op, name, value, dims, layout)


def _reduce_same(
    op: ReduceOp, name: str, value: Any, dims: tuple[int, ...] | None, layout: ReplicaMesh
) -> Any:
    """Reduce a value that every replica has alike."""
    if dims is not None:
        array = jnp.asarray(value)
        on = _checked_dims(name, array, dims)
        if op is ReduceOp.MEAN:
            return _settled(jnp.mean(array, axis=on, dtype=result_dtype(op, array.dtype)))
        total = jnp.sum(array, axis=on, dtype=result_dtype(op, array.dtype))
        return _settled(total * jnp.asarray(layout.num_replicas, total.dtype))
    if op is ReduceOp.MEAN or layout.num_replicas == 1:
        return value
    if isinstance(value, jax.core.Tracer) or _is_mirrored(value, layout):
        array = jnp.asarray(value)
        array = array.astype(result_dtype(op, array.dtype))
        return _settled(array * jnp.asarray(layout.num_replicas, array.dtype))
    if isinstance(value, (int, float, np.ndarray, np.generic)) and not np.any(value):
        return value
    raise ArgumentError(
        f"Strategy.reduce(SUM, ...) was given {name}, a {type(value).__name__} that is not "
        f"distributed: it has one value, and the strategy has {layout.num_replicas} replicas.\n\n"
        "Only a PerReplica, an array laid out over the replicas, or one that is replicated over "
        "the strategy's devices can be summed over replicas.\n\n"
        f"Multiply by {layout.num_replicas} if that is meant, use 'MEAN' (which gives it back), or "
        "lay it out with jax.device_put(value, strategy.replicated_sharding)."
    )


def _is_mirrored(value: Any, layout: ReplicaMesh) -> bool:
    return (
        isinstance(value, jax.Array)
        and len(value.sharding.device_set) == len(layout.devices)
        and _compat.is_committed(value)
        and placement_of(value, layout).kind is Kind.MIRRORED
    )


def _reduce_per_replica(
    op: ReduceOp, name: str, value: PerReplica, dims: tuple[int, ...] | None, layout: ReplicaMesh
) -> Any:
    if not value.is_global or not isinstance(value.array, jax.Array):
        return _reduce_held(op, name, value, dims, layout)
    array = value.array
    check_numeric("Strategy.reduce", name, array)
    local = (array.shape[0] // layout.num_replicas, *array.shape[1:])
    scalars = value.form is Form.SCALARS
    on = None if dims is None else _checked_local(name, array, () if scalars else local, dims)
    shape = (layout.num_replicas,) if scalars else (layout.num_replicas, *local)
    over = (0,) if on is None else (0, *(d + 1 for d in on))
    dtype = result_dtype(op, array.dtype)
    small = array.size * array.dtype.itemsize <= HOST_BYTES
    if small and not isinstance(array, jax.core.Tracer) and array.is_fully_addressable:
        return _from_host(_host_reduce(op, np.asarray(array).reshape(shape), over, dtype))
    result = _device_reduce(array, op, shape, over, dtype)
    return result if isinstance(result, jax.core.Tracer) else _settled(result)


def _host_reduce(op: ReduceOp, rows: np.ndarray, over: tuple[int, ...], dtype: Any) -> np.ndarray:
    """NumPy's sum or mean, with half precision added up in float32 as XLA does."""
    wide = (
        np.dtype(np.float32)
        if np.dtype(dtype).itemsize < 4 and jnp.issubdtype(dtype, jnp.floating)
        else np.dtype(dtype)
    )
    total = np.add.reduce(rows, axis=over, dtype=wide)
    if op is ReduceOp.MEAN:
        count = 1
        for d in over:
            count *= rows.shape[d]
        with np.errstate(invalid="ignore", divide="ignore"):
            total = np.divide(total, wide.type(count))
    return np.asarray(total, dtype)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _device_reduce(
    array: jax.Array, op: ReduceOp, shape: tuple[int, ...], over: tuple[int, ...], dtype: Any
) -> jax.Array:
    rows = array.reshape(shape)
    return (jnp.mean if op is ReduceOp.MEAN else jnp.sum)(rows, axis=over, dtype=dtype)


def _reduce_held(
    op: ReduceOp, name: str, value: PerReplica, dims: tuple[int, ...] | None, layout: ReplicaMesh
) -> Any:
    """Values held one by one: not placed yet, or of different shapes."""
    _check_count(name, value, layout)
    for v in value.values:
        check_numeric("Strategy.reduce", name, v)
    arrays = [np.asarray(v) for v in value.values]
    dtype = result_dtype(op, np.result_type(*[jnp.asarray(a).dtype for a in arrays]))
    if dims is None:
        if len({a.shape for a in arrays}) > 1:
            shapes = ", ".join(f"replica {i}: {list(a.shape)}" for i, a in enumerate(arrays))
            raise ShapeError(
                f"Strategy.reduce(axis=None) cannot add the values of {name}: their shapes differ "
                f"({shapes}).\n\naxis=None combines them element by element.\n\n"
                "Give axis=0 to reduce the rows of all replicas together."
            )
        return _from_host(_host_reduce(op, np.stack(arrays), (0,), dtype))
    sums: list[np.ndarray] = []
    count = 0
    for a in arrays:
        on = _checked_dims(name, a, dims)
        sums.append(_host_reduce(ReduceOp.SUM, a, on, dtype))
        count += int(np.prod([a.shape[d] for d in on]))
    total = np.add.reduce(sums)
    if op is ReduceOp.MEAN:
        with np.errstate(invalid="ignore", divide="ignore"):
            total = np.divide(total, np.asarray(count, total.dtype))
    return _from_host(np.asarray(total, dtype))


def gather_across(name: str, value: Any, axis: int, layout: ReplicaMesh) -> Any:
    """`Strategy.gather` of one leaf."""
    caller = "Strategy.gather"
    if not isinstance(value, PerReplica):
        if isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer):
            placed = placement_of(value, layout)
            if placed.kind is Kind.PER_REPLICA:
                return gather_across(name, PerReplica.of_global(value), axis, layout)
            if layout.num_replicas > 1 and _is_mirrored(value, layout):
                dim = gather_dim(caller, name, value, axis)
                held = np.asarray(value)
                return _from_host(np.concatenate([held] * layout.num_replicas, axis=dim))
        return value
    if not value.is_global:
        return _gather_held(name, value, axis, layout)
    array = value.array
    if value.form is Form.SCALARS:
        gather_dim(caller, name, np.empty((), array.dtype), axis)
    dim = gather_dim(caller, name, array, axis)
    if isinstance(array, jax.core.Tracer):
        return _concatenated(array, dim, layout.num_replicas)
    is_key = jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended)
    if is_key or not array.is_fully_addressable:
        moved = jax.jit(_concatenated, static_argnums=(1, 2), out_shardings=layout.replicated)
        return _settled(moved(array, dim, layout.num_replicas))
    held = np.asarray(array)
    if dim:
        rows = np.split(held, layout.num_replicas)
        held = np.concatenate(rows, axis=dim)
    return _from_host(held)


def _concatenated(array: jax.Array, dim: int, num_replicas: int) -> jax.Array:
    if not dim:
        return array
    return jnp.concatenate(jnp.split(array, num_replicas), axis=dim)


def _gather_held(name: str, value: PerReplica, axis: int, layout: ReplicaMesh) -> Any:
    _check_count(name, value, layout)
    arrays = [np.asarray(v) for v in value.values]
    dims = {gather_dim("Strategy.gather", name, a, axis) for a in arrays}
    dim = min(dims)
    off = {(*a.shape[:dim], *a.shape[dim + 1 :]) for a in arrays}
    if len(off) > 1 or len({a.ndim for a in arrays}) > 1:
        shapes = ", ".join(f"replica {i}: {list(a.shape)}" for i, a in enumerate(arrays))
        raise ShapeError(
            f"Strategy.gather(axis={axis}) cannot concatenate {name}: {shapes}.\n\n"
            f"Shapes may differ in dim {dim} only.\n\n"
            "Gather on the dim that differs, or pad the others first."
        )
    return _from_host(np.concatenate(arrays, axis=dim))


def _check_count(name: str, value: PerReplica, layout: ReplicaMesh) -> None:
    if len(value.values) != len(layout.local_replicas):
        raise ReplicaValueError(
            f"{name} is a PerReplica with {len(value.values)} values, and the strategy has "
            f"{len(layout.local_replicas)} replicas in this process.\n\n"
            "Use the strategy that made the value."
        )


def _dims(name: str, axis: Any) -> tuple[int, ...]:
    given: Sequence[Any] = axis if isinstance(axis, tuple) else (axis,)
    if any(isinstance(a, bool) or not hasattr(a, "__index__") for a in given):
        raise ArgumentTypeError(
            f"Strategy.reduce was given axis={axis!r} for {name}.\n\n"
            "axis is None, an integer, or a tuple of integers."
        )
    return tuple(a.__index__() for a in given)


def _checked_dims(name: str, array: Any, dims: tuple[int, ...]) -> tuple[int, ...]:
    return _checked_local(name, array, tuple(array.shape), dims)


def _checked_local(
    name: str, array: Any, local: tuple[int, ...], dims: tuple[int, ...]
) -> tuple[int, ...]:
    rank = len(local)
    outside = [d for d in dims if not -rank <= d < rank]
    if outside:
        valid = list(range(-rank, rank))
        advice = f"axis must lie in {valid}" if rank else "a scalar has no axis; pass axis=None"
        raise ShapeError(
            f"Strategy.reduce was given axis={outside[0]} for {name}, whose value on a replica is "
            f"{array.dtype}{list(local)} of rank {rank}.\n\n{advice}."
        )
    found = tuple(dict.fromkeys(d % rank for d in dims))
    return found


def _from_host(array: np.ndarray) -> jax.Array:
    """An array of this process's default device, tied to none."""
    if array.dtype != jax.dtypes.canonicalize_dtype(array.dtype):
        return jnp.asarray(array)
    return _compat.put_uncommitted(array)


def _settled(array: jax.Array) -> jax.Array:
    """A result of the mesh as one plain array: the piece on its first device, tied to none."""
    if isinstance(array, jax.core.Tracer) or not array.is_fully_addressable:
        return array
    if len(array.sharding.device_set) == 1:
        return array
    if not array.is_fully_replicated:
        return _from_host(np.asarray(array))
    return _compat.as_uncommitted(array)
