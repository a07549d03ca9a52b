"""The destinations of a reduction."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxdist import _mesh as meshes
from jaxdist._called import called, name_call, refuse
from jaxdist._devices import runtime
from jaxdist._mesh import ReplicaMesh
from jaxdist._processes import get_current_process
from jaxdist._typing import PyTree
from jaxdist._validate import show
from jaxdist._values import Handle, PerReplica, Variable, copy_if_writable, put
from jaxdist.errors import DeviceError


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
    """Return the devices that destinations name, or none if they name none."""
    if isinstance(destinations, (list, tuple)):
        return [runtime.device_from_name(d) for d in destinations]
    target = find_target(destinations, None)
    if isinstance(target, NamedSharding):
        return list(target.mesh.devices.ravel())
    return [target] if isinstance(target, jax.Device) else []
