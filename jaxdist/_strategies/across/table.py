"""The table of `reduce` and `gather`: a function for each context and kind of value."""

import dataclasses
import enum
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist import _collectives
from jaxdist._called import call_as
from jaxdist._collectives import Function, ReduceOp, Request, ValueKind
from jaxdist._mesh import ReplicaMesh
from jaxdist._strategies.across import in_merge
from jaxdist._values import Form, PerReplica, as_per_replica, place_per_replica, view_auto


def _reduce_by_ops(request: Request, named: dict[str, Any]) -> list[Any]:
    """Reduce leaves, given by name, in one batch."""
    op, axis, layout, ops = request.op, request.axis, request.layout, request.ops
    given = {name: as_per_replica(v) for name, v in named.items()}
    values = list(given.values())
    counts: list[int] = [1] * len(values)
    # `CrossDeviceOps` can only sum over replicas. So the dims of each local value are summed first,
    # and a mean divides by the total number of elements, since replicas may have different numbers.
    if axis is not None:
        pairs = zip(named, values, strict=True)
        sums = [_sum_locally(request, name, v) for name, v in pairs]
        values, counts = [s for s, _ in sums], [c for _, c in sums]
    placed = [place_per_replica(name, v, layout) for name, v in zip(named, values, strict=True)]
    for name, v in zip(named, placed, strict=True):
        _collectives.check_numeric(name, v.array)
    # The classes of jaxdist work on the global array of all replicas. A user's class gets one
    # uncommitted array per replica: JAX refuses to combine arrays on different devices.
    own_sums = isinstance(ops, _collectives.AlgorithmicOps)
    # XLA wraps integers around without an error, so sums of Python integers are checked first.
    if op is ReduceOp.SUM and own_sums:
        for name, v in given.items():
            call_as("Strategy.reduce", _collectives.check_sum, name, v, axis)
    if not own_sums:
        placed = [_make_uncommitted(v) for v in placed]
    across = op if axis is None else ReduceOp.SUM
    shapes = [_collectives.local_shape(v) for v in placed]
    results = ops.batch_reduce(across, [(v, v) for v in placed], request.options)
    results = _collectives.check_results(ops, results, shapes)
    settled = [_collectives.take_plain_array(r) for r in results]
    if axis is None or op is ReduceOp.SUM:
        return settled
    return [r / jnp.asarray(c, r.dtype) for r, c in zip(settled, counts, strict=True)]


def _gather_by_ops(request: Request, name: str, leaf: Any) -> Any:
    """Gather one leaf with the user's `gather_implementation`."""
    value = as_per_replica(leaf)
    value = _make_uncommitted(value) if value.is_global else value
    found = _collectives.gather_by_ops(
        request.ops, name, value, request.axis, request.layout, request.options
    )
    return _collectives.take_plain_array(found)


def _sum_locally(request: Request, name: str, value: PerReplica) -> tuple[PerReplica, int]:
    """Sum dims of the value on each replica; return the sums and the total number of summands."""
    op, axis, layout = request.op, request.axis, request.layout
    if not value.is_global:
        # Values of different shapes do not form a global array, so the host sums them one by one.
        rows = [np.asarray(v) for v in value.values]
        dims = [_collectives.find_reduced_dims(name, r, axis) for r in rows]
        dtype = _collectives.result_dtype(op, jnp.asarray(rows[0]).dtype)
        sums = [np.sum(r, axis=d, dtype=dtype) for r, d in zip(rows, dims, strict=True)]
        count = sum(math.prod(r.shape[i] for i in d) for r, d in zip(rows, dims, strict=True))
        return PerReplica(sums), count
    whole = place_per_replica(name, value, layout).array
    scalars = value.form is Form.SCALARS
    replicas = layout.num_replicas
    local = () if scalars else (whole.shape[0] // replicas, *whole.shape[1:])
    on = _collectives.find_reduced_dims(name, jax.ShapeDtypeStruct(local, whole.dtype), axis)
    dtype = _collectives.result_dtype(op, whole.dtype)
    sums = _make_local_sums(layout)(
        view_auto(whole), (replicas, *local), tuple(d + 1 for d in on), dtype
    )
    count = replicas * math.prod(local[d] for d in on)
    return _as_per_replica(sums, replicas), count


def _make_uncommitted(value: PerReplica) -> PerReplica:
    """Return the values as uncommitted arrays, which JAX can combine."""
    return PerReplica([_collectives.take_plain_array(x) for x in value.values])


def _as_per_replica(sums: jax.Array, replicas: int) -> PerReplica:
    """Convert an array `[replicas, ...]` to a `PerReplica`."""
    if sums.ndim == 1:
        return PerReplica.of_global(sums, scalars=True)
    flat = (replicas * sums.shape[1], *sums.shape[2:])
    return PerReplica.of_global(sums.reshape(flat))


@functools.lru_cache(maxsize=64)
def _make_local_sums(layout: ReplicaMesh) -> Any:
    def sums(whole: Any, shape: tuple[int, ...], over: tuple[int, ...], dtype: Any) -> Any:
        return jnp.sum(whole.reshape(shape), axis=over, dtype=dtype)

    return jax.jit(sums, static_argnums=(1, 2, 3), out_shardings=layout.per_replica)


class Context(enum.Enum):
    """The context in which a strategy combines values. See Note [Kinds and contexts]."""

    OUTSIDE = "outside of a step"
    BY_OPS = "outside of a step, by the user's CrossDeviceOps"
    IN_MERGE = "in a merge function, while a step is traced"


@dataclasses.dataclass(frozen=True)
class Together:
    """A function that combines several leaves, given by name, in one call."""

    function: Callable[[Request, dict[str, Any]], list[Any]]


Table: TypeAlias = Mapping[Context, Mapping[ValueKind, Function | Together]]

_OF_REPLICAS = (ValueKind.HELD, ValueKind.LIST)

REDUCE: Table = {
    Context.OUTSIDE: _collectives.REDUCE,
    Context.BY_OPS: {
        **_collectives.REDUCE,
        **dict.fromkeys((*_OF_REPLICAS, ValueKind.ROWS), Together(_reduce_by_ops)),
    },
    # A concrete array is equal on all replicas. A traced value that the function closes over may
    # differ between them, so it is reduced like a handle.
    Context.IN_MERGE: {
        **_collectives.REDUCE,
        **dict.fromkeys(
            (*_OF_REPLICAS, ValueKind.TRACED_VALUES, ValueKind.TRACED),
            Together(in_merge.reduce_own_values),
        ),
        ValueKind.SLICES: in_merge.reduce_slices,
    },
}
GATHER: Table = {
    Context.OUTSIDE: _collectives.GATHER,
    Context.BY_OPS: {
        **_collectives.GATHER,
        **dict.fromkeys((*_OF_REPLICAS, ValueKind.ROWS), _gather_by_ops),
    },
    Context.IN_MERGE: {
        **_collectives.GATHER,
        **dict.fromkeys((*_OF_REPLICAS, ValueKind.TRACED_VALUES), in_merge.gather_own_value),
        **dict.fromkeys(
            (ValueKind.ROWS, ValueKind.TRACED, ValueKind.SHARDED, ValueKind.ONE), in_merge.keep
        ),
    },
}


def apply(
    found: Mapping[str, Function | Together], request: Request, named: dict[str, Any]
) -> list[Any]:
    """Apply to each leaf the function found for its name; return the results in order."""
    results = dict(named)
    for together in dict.fromkeys(f for f in found.values() if isinstance(f, Together)):
        own = {name: named[name] for name, f in found.items() if f == together}
        results.update(zip(own, together.function(request, own), strict=True))
    for name, function in found.items():
        if not isinstance(function, Together):
            results[name] = function(request, name, named[name])
    return list(results.values())
