"""The operands of `CrossDeviceOps`, and the mesh on which they are reduced."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxdist import _compat
from jaxdist import _mesh as meshes
from jaxdist._called import called, name_call, refuse
from jaxdist._collectives.across.kinds import join_slices
from jaxdist._collectives.in_replica import gather_dim, gather_over_replicas
from jaxdist._collectives.reduction import check_numeric
from jaxdist._devices import runtime
from jaxdist._integers import check_all_fit
from jaxdist._mesh import ReplicaMesh
from jaxdist._processes import get_current_process
from jaxdist._typing import PyTree
from jaxdist._validate import show
from jaxdist._values import (
    Form,
    Handle,
    IndexedSlices,
    PerReplica,
    Variable,
    copy_if_writable,
    get_call_context,
    put,
)
from jaxdist.errors import ArgumentTypeError, ContextError, DeviceError, ReplicaValueError


def find_target(destinations: Any, layout: ReplicaMesh | None) -> Any:
    """Return a device, or a replicated sharding; None if only a distributed value can tell.

    Args:
        destinations: A device or its name, a distributed value, or a list of devices.
        layout: The mesh of the values, if it is known.

    Raises:
        ArgumentError: The destinations are something else, or empty.
        DeviceError: A device does not exist.
    """
    caller = name_call()
    if isinstance(destinations, (str, jax.Device)) and destinations != "":
        device = runtime.device_from_name(destinations, f"{caller}(destinations=...)")
        return _check_is_here(device)
    if isinstance(destinations, (PerReplica, Variable, jax.Array)):
        return _find_target_of_value(destinations, layout)
    if isinstance(destinations, (list, tuple)) and destinations:
        devices = runtime.distinct_devices(destinations, "destinations")
        if layout is not None and set(devices) == layout.device_set:
            # The sharding of the values' own mesh, so that the result needs no further copy.
            return layout.replicated
        if len(devices) == 1:
            return _check_is_here(devices[0])
        return meshes.build(devices).replicated
    raise refuse(
        f"destinations={show(destinations)}.",
        "destinations is a device or its name, a list of them, or a distributed value.",
        f"Pass for instance destinations='{jax.default_backend()}:0'.",
    )


def _check_is_here(device: jax.Device) -> jax.Device:
    """Return a single device; raise if it is one of another process, which alone can use it."""
    here = get_current_process().index
    if device.process_index == here:
        return device
    raise refuse(
        f"destinations={runtime.device_name(device)!r}, a device of process {device.process_index}"
        f", in process {here}.",
        "Each process gets the result on a device of its own, or on all devices of the strategy.",
        f"Pass one of {runtime.list_device_names()}, which names a device of each process, or a "
        "list of all devices of the strategy.",
        kind=DeviceError,
    )


def _find_target_of_value(value: Any, layout: ReplicaMesh | None) -> Any:
    """Return the placement that replicates over the devices of a value, or None."""
    if layout is not None:
        return layout.replicated
    if isinstance(value, PerReplica):
        value = value.array if value.is_global and not isinstance(value, Handle) else None
    # The sharding of a tracer cannot be read.
    if isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer):
        sharding = value.sharding
        if isinstance(sharding, NamedSharding):
            return NamedSharding(sharding.mesh, PartitionSpec())
        if len(sharding.device_set) == 1:
            return next(iter(sharding.device_set))
    return None


def target_in_strategy(destinations: Any, layout: ReplicaMesh) -> Any:
    """Return the target of a strategy: one device, or all devices of the strategy."""
    target = find_target(destinations, layout)
    if isinstance(target, NamedSharding) and target != layout.replicated:
        raise refuse(
            f"{len(destinations)} destinations that are not the strategy's own devices: "
            f"{[str(d) for d in destinations]}.",
            "The destination is one device, or all devices of the strategy.",
            f"Pass one device, or all of {[str(d) for d in layout.devices]}.",
            kind=DeviceError,
        )
    return target


def put_on_target(value: PyTree, target: Any) -> PyTree:
    """Return a pytree of arrays on a target; tracers are returned unchanged."""

    def put_leaf(leaf: Any) -> Any:
        # See Note [Who owns host memory].
        return leaf if isinstance(leaf, jax.core.Tracer) else put(copy_if_writable(leaf), target)

    return jax.tree.map(put_leaf, value)


@called("")
def list_devices(destinations: Any) -> Sequence[jax.Device]:
    """Return the devices that destinations name, or an empty list if they name no device."""
    if isinstance(destinations, (list, tuple)):
        return [runtime.device_from_name(d) for d in destinations]
    target = find_target(destinations, None)
    if isinstance(target, NamedSharding):
        return list(target.mesh.devices.ravel())
    return [target] if isinstance(target, jax.Device) else []


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
            f"{name_call()} was called in a step, and {name} is not a value of all replicas there: "
            f"{value!r}.\n\nIn a step, a replica has only its own value; a merge function gets "
            "the values of all.\n\nCall get_replica_context().all_reduce(op, value) or "
            f".all_gather(value, axis), or {name_call()} in merge_fn of "
            "get_replica_context().merge_call(merge_fn, args=(value,))."
        )
    rows = value.array if isinstance(value, PerReplica) and value.is_global else value
    if isinstance(rows, jax.core.Tracer):
        raise refuse(
            f"{name}={value!r} inside a trace (jax.jit, jax.grad ...), where the layout of an "
            "array cannot be seen.",
            "The layout says which rows belong to which replica.",
            "Call strategy.reduce or strategy.gather, which know their replicas, or pass the "
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
            "Values that are reduced together must be of the same replicas.",
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
            f"Request more CPU devices before JAX starts: jaxdist.testing.virtual_devices({count}"
            ").",
            kind=ReplicaValueError,
        )
    return meshes.build(present[:count])


def _find_own_devices(value: PerReplica) -> list[jax.Device]:
    """Return the devices of the values, if each value has a device of its own."""
    if value.is_global:
        return []
    sets = [v.devices() for v in value.values if _compat.is_concrete(v)]
    alone = [next(iter(s)) for s in sets if len(s) == 1]
    return alone if len(set(alone)) == len(value.values) else []


def gather_handle(handle: Handle, axis: int) -> jax.Array:
    """Return `gather` while a step is traced, as an all-gather."""
    dim = gather_dim("per_replica_value", handle.local, axis)
    return gather_over_replicas(handle.local, dim, handle.layout.replica_axes)


def read_slices(name: str, value: Any) -> IndexedSlices | None:
    """Return `value` as slices with per-replica parts, or None if it has no slices.

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
            "Pass IndexedSlices on every replica, or slices.to_dense() on each.",
            kind=ReplicaValueError,
        )
    return join_slices(value)
