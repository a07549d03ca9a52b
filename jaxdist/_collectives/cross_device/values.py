"""The operands of `CrossDeviceOps`, and the mesh on which they are reduced."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxdist import _mesh as meshes
from jaxdist._called import name_call, refuse
from jaxdist._collectives.across.kinds import join_slices
from jaxdist._collectives.across.slices import scale_rows
from jaxdist._collectives.cross_device.destinations import list_devices
from jaxdist._collectives.in_replica import gather_dim, gather_over_replicas
from jaxdist._collectives.reduction import ReduceOp, check_numeric
from jaxdist._devices import runtime
from jaxdist._integers import check_all_fit
from jaxdist._mesh import ReplicaMesh
from jaxdist._values import (
    Form,
    Handle,
    IndexedSlices,
    PerReplica,
    Variable,
    get_call_context,
    place_per_replica,
)
from jaxdist.errors import ArgumentTypeError, ContextError, ReplicaValueError


def as_per_replica(name: str, value: Any) -> PerReplica:
    """Return `value` as a `PerReplica`; a value that is not distributed belongs to one replica.

    Raises:
        ContextError: The call is in a step, where a value belongs to one replica.
        ReplicaValueError: The value has no numbers, or it is traced and its sharding is unknown.
    """
    if isinstance(value, Variable):
        value = value.distributed
    _refuse_traced(name, value)
    check_all_fit(name, value)
    rows = isinstance(value, PerReplica) and not value.is_global
    if isinstance(value, IndexedSlices) or (
        rows and any(isinstance(v, IndexedSlices) for v in value.values)
    ):
        raise ReplicaValueError(
            f"{name_call()}: {name} is IndexedSlices.\n\n"
            "A gather of the rows alone would lose their indices.\n\n"
            "Reduce them, which concatenates the rows of all replicas: "
            "ops.reduce('SUM', slices, destinations); or pass slices.to_dense()."
        )
    try:
        found = value if isinstance(value, PerReplica) else _as_distributed(value)
        if not isinstance(found, Handle):
            for v in (found.array,) if found.is_global else found.values:
                check_numeric(name, v)
    except (ArgumentTypeError, TypeError) as error:
        raise refuse(
            f"{name}={value!r}, of type {type(value).__name__}.",
            "It takes a PerReplica of numbers, with one value for each replica.",
            "Make one: jaxdist.PerReplica([value_of_replica_0, value_of_replica_1, ...]).",
            kind=ReplicaValueError,
        ) from error
    return found


def _refuse_traced(name: str, value: Any) -> None:
    """Refuse a value whose replicas are unknown, because it is traced."""
    if isinstance(value, Handle):
        return
    is_traced = isinstance(value, jax.core.Tracer)
    if get_call_context().in_replica and (is_traced or isinstance(value, PerReplica)):
        raise ContextError(
            f"{name_call()} was called in a step, and {name} is no value of all replicas there: "
            f"{value!r}.\n\nIn a step, a replica has its own value alone; a merge function gets "
            "those of all.\n\nCall get_replica_context().all_reduce(op, value) or "
            f".all_gather(value, axis), or {name_call()} in merge_fn of "
            "get_replica_context().merge_call(merge_fn, args=(value,))."
        )
    rows = value.array if isinstance(value, PerReplica) and value.is_global else value
    if isinstance(rows, jax.core.Tracer):
        raise refuse(
            f"{name}={value!r} inside a trace (jax.jit, jax.grad ...), where the layout of an "
            "array cannot be seen.",
            "The layout says which rows belong to which replica.",
            "Call strategy.reduce or strategy.gather, which know their replicas, or give the "
            "values one by one: jaxdist.PerReplica([value_of_replica_0, ...]).",
            kind=ReplicaValueError,
        )


def _as_distributed(value: Any) -> PerReplica:
    """Return an array as a `PerReplica`, by its sharding."""
    if isinstance(value, jax.Array) and isinstance(value.sharding, NamedSharding):
        spec = tuple(value.sharding.spec)
        # Sharded on dim 0 alone: one block of rows for each replica.
        if spec and spec[0] is not None and not any(spec[1:]):
            return PerReplica.of_global(value)
        if value.is_fully_replicated:
            return PerReplica([value.addressable_data(0)] * len(value.sharding.device_set))
    # Python numbers are not converted, so that too large integers can still be found.
    if not hasattr(value, "dtype") and not isinstance(value, (int, float, complex)):
        value = np.asarray(value)
    return PerReplica([value])


def local_shape(value: PerReplica) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of a value on the first replica."""
    if isinstance(value, Handle):
        first: Any = value.local
    elif value.is_global:
        rows = value.array
        if value.form is Form.SCALARS:
            return jax.ShapeDtypeStruct((), rows.dtype)
        return jax.ShapeDtypeStruct(
            (rows.shape[0] // count_replicas(value), *rows.shape[1:]), rows.dtype
        )
    else:
        first = value.values[0]
    kind = first if hasattr(first, "dtype") else np.asarray(first)
    return jax.ShapeDtypeStruct(kind.shape, kind.dtype)


def count_replicas(value: PerReplica) -> int:
    """Return the number of replicas of a value."""
    found = _find_mesh(value)
    return len(value.values) if found is None else found.num_replicas


def _find_mesh(value: PerReplica) -> ReplicaMesh | None:
    """Return the mesh of a distributed value, or None if it is a list of values."""
    if isinstance(value, Handle):
        return value.layout
    array = value.array if value.is_global else None
    if not isinstance(array, jax.Array) or not isinstance(array.sharding, NamedSharding):
        return None
    spec = tuple(array.sharding.spec)
    axes = spec[0] if spec else None
    mesh = array.sharding.mesh
    # An `AbstractMesh` has no devices.
    if axes is None or not isinstance(mesh, Mesh):
        return None
    return meshes.adopt(mesh, axes)


def find_layout(values: Sequence[PerReplica], destinations: Sequence[Any]) -> ReplicaMesh:
    """Return the mesh of the values, or that of the destinations, or a new one.

    Raises:
        ReplicaValueError: The values have different numbers of replicas, or there are too few
            devices.
    """
    counts = [count_replicas(v) for v in values]
    if len(set(counts)) > 1:
        raise refuse(
            f"values of different numbers of replicas: {counts}.",
            "Values that are reduced together are of the same replicas.",
            "Call it once for the values of each number of replicas.",
            kind=ReplicaValueError,
        )
    for value in values:
        found = _find_mesh(value)
        if found is not None:
            return found
    count = counts[0]
    # First the devices that already have the values, which need no copies. Then the destinations,
    # which get the result. Any devices come last.
    for devices in (*map(_find_own_devices, values), *map(list_devices, destinations)):
        if len(devices) == count:
            return meshes.build(devices)
    present = runtime.default_devices()
    if count > len(present):
        raise refuse(
            f"a PerReplica of {count} values, and this process has {len(present)} device(s).",
            "Each value is reduced on a device of its own.",
            f"Ask for more CPU devices before JAX starts: jaxdist.testing.virtual_devices({count}"
            ").",
            kind=ReplicaValueError,
        )
    return meshes.build(present[:count])


def _find_own_devices(value: PerReplica) -> list[jax.Device]:
    """Return the devices of the values, if each value has a device of its own."""
    if value.is_global:
        return []
    sets = [
        v.devices()
        for v in value.values
        if isinstance(v, jax.Array) and not isinstance(v, jax.core.Tracer)
    ]
    alone = [next(iter(s)) for s in sets if len(s) == 1]
    return alone if len(set(alone)) == len(value.values) else []


def put_on_mesh(values: Sequence[PerReplica], layout: ReplicaMesh) -> list[PerReplica]:
    """Return the values as global arrays on the mesh, with dim 0 sharded over the replicas."""
    caller = name_call()
    return [place_per_replica(f"{caller}: value {i}", v, layout) for i, v in enumerate(values)]


def gather_handle(handle: Handle, axis: int) -> jax.Array:
    """Return `gather` while a step is traced, as an all-gather."""
    dim = gather_dim("per_replica_value", handle.local, axis)
    return gather_over_replicas(handle.local, dim, handle.layout.replica_axes)


# A function that concatenates one part over the replicas, on the destinations.
Gather = Callable[[PerReplica], Any]


def read_slices(name: str, value: Any) -> IndexedSlices | None:
    """Return `value` as slices with per-replica parts, or None if it holds none.

    Raises:
        ReplicaValueError: Only some replicas have slices, or their whole arrays differ.
    """
    if isinstance(value, IndexedSlices):
        return value
    if not isinstance(value, PerReplica) or value.is_global:
        return None
    parts = value.values
    kinds = [isinstance(p, IndexedSlices) for p in parts]
    if not any(kinds):
        return None
    shapes = [p.dense_shape if isinstance(p, IndexedSlices) else p for p in parts]
    if not all(kinds) or len(set(shapes)) > 1:
        found = "\n".join(f"  replica {r}: {p!r}" for r, p in enumerate(parts))
        raise refuse(
            f"{name} that is not of one kind:\n{found}",
            "Slices are reduced with slices, of one whole array (dense_shape).",
            "Give IndexedSlices on every replica, or slices.to_dense() on each.",
            kind=ReplicaValueError,
        )
    return join_slices(value)


def reduce_slices(name: str, op: ReduceOp, slices: IndexedSlices, gather: Gather) -> IndexedSlices:
    """Return the rows of all replicas; for a mean, divided by the number of replicas."""
    values = as_per_replica(f"{name}.values", slices.values)
    indices = as_per_replica(f"{name}.indices", slices.indices)
    rows, numbers = gather(values), gather(indices)
    return slices.with_parts(scale_rows(op, rows, count_replicas(values)), numbers)
