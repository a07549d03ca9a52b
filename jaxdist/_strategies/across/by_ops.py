"""`Strategy.reduce` and `gather` by the user's `CrossDeviceOps`."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist import _collectives
from jaxdist._collectives import CommunicationOptions, CrossDeviceOps, ReduceOp
from jaxdist._mesh import ReplicaMesh
from jaxdist._values import Form, Kind, PerReplica, place_per_replica, placement_of


class OpsReducer:
    """Reduction of the per-replica leaves of one call by the `CrossDeviceOps` of a strategy."""

    def __init__(
        self, ops: CrossDeviceOps, layout: ReplicaMesh, options: CommunicationOptions
    ) -> None:
        self._ops = ops
        self._layout = layout
        self._options = options

    def can_reduce(self, leaf: Any) -> bool:
        """Whether `leaf` is a per-replica value that is not traced."""
        if isinstance(leaf, jax.core.Tracer):
            return False
        if isinstance(leaf, PerReplica):
            return not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(leaf))
        is_array = isinstance(leaf, jax.Array)
        return is_array and placement_of(leaf, self._layout).kind is Kind.PER_REPLICA

    def reduce(self, op: ReduceOp, named: dict[str, Any], axis: Any) -> list[Any]:
        """Reduce the leaves, given by name, in one batch."""
        given = {
            name: v if isinstance(v, PerReplica) else PerReplica.of_global(v)
            for name, v in named.items()
        }
        values = list(given.values())
        counts: list[int] = [1] * len(values)
        # `CrossDeviceOps` only know sums over replicas. Dims of a local value are summed first, and
        # the mean divides by the number of all elements, which may differ between replicas.
        if axis is not None:
            pairs = zip(named, values, strict=True)
            sums = [self._sum_locally(op, name, v, axis) for name, v in pairs]
            values, counts = [s for s, _ in sums], [c for _, c in sums]
        placed = [
            place_per_replica(name, v, self._layout) for name, v in zip(named, values, strict=True)
        ]
        for name, v in zip(named, placed, strict=True):
            _collectives.check_numeric("Strategy.reduce", name, v.array)
        # Classes of jaxdist work on the global array of all replicas. A class of the user gets one
        # uncommitted array per replica: JAX refuses to combine arrays of different devices.
        own_sums = isinstance(self._ops, _collectives.AlgorithmicOps)
        # XLA wraps integers around without an error, so sums of Python integers are checked first.
        if op is ReduceOp.SUM and own_sums:
            for name, v in given.items():
                _collectives.check_sum(name, v, axis)
        if not own_sums:
            placed = [_make_uncommitted(v) for v in placed]
        across = op if axis is None else ReduceOp.SUM
        shapes = [_get_local_shape(v) for v in placed]
        results = self._ops.batch_reduce(across, [(v, v) for v in placed], self._options)
        results = _collectives.check_results(self._ops, results, shapes)
        settled = [_collectives.take_plain_array(r) for r in results]
        if axis is None or op is ReduceOp.SUM:
            return settled
        return [r / jnp.asarray(c, r.dtype) for r, c in zip(settled, counts, strict=True)]

    def gather(self, name: str, leaf: Any, axis: int) -> Any:
        """Gather one leaf with the user's `gather_implementation`."""
        value = leaf if isinstance(leaf, PerReplica) else PerReplica.of_global(leaf)
        value = _make_uncommitted(value) if value.is_global else value
        found = _collectives.gather_by_ops(
            self._ops, name, value, axis, self._layout, self._options
        )
        return _collectives.take_plain_array(found)

    def _sum_locally(
        self, op: ReduceOp, name: str, value: PerReplica, axis: Any
    ) -> tuple[PerReplica, int]:
        """Sum dims of the value on each replica; return the sums and the number of all summands."""
        if not value.is_global:
            # Values of different shapes are no global array, so the host sums them one by one.
            rows = [np.asarray(v) for v in value.values]
            dims = [_collectives.find_reduced_dims(name, r, axis) for r in rows]
            dtype = _collectives.result_dtype(op, jnp.asarray(rows[0]).dtype)
            sums = [np.sum(r, axis=d, dtype=dtype) for r, d in zip(rows, dims, strict=True)]
            count = sum(math.prod(r.shape[i] for i in d) for r, d in zip(rows, dims, strict=True))
            return PerReplica(sums), count
        whole = place_per_replica(name, value, self._layout).array
        scalars = value.form is Form.SCALARS
        replicas = self._layout.num_replicas
        local = () if scalars else (whole.shape[0] // replicas, *whole.shape[1:])
        on = _collectives.find_reduced_dims(name, jax.ShapeDtypeStruct(local, whole.dtype), axis)
        dtype = _collectives.result_dtype(op, whole.dtype)
        sums = _make_local_sums(self._layout)(
            whole, (replicas, *local), tuple(d + 1 for d in on), dtype
        )
        count = replicas * math.prod(local[d] for d in on)
        return _as_per_replica(sums, replicas), count


def _make_uncommitted(value: PerReplica) -> PerReplica:
    """Return the values as uncommitted arrays, which JAX can combine."""
    return PerReplica([_collectives.take_plain_array(x) for x in value.values])


def _get_local_shape(value: PerReplica) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of the value of one replica."""
    first = value.values[0]
    return jax.ShapeDtypeStruct(first.shape, first.dtype)


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
