"""`CentralStorageStrategy`: a replica on each compute device, and variables on one device."""

import dataclasses
from collections.abc import Sequence
from typing import Any, final

import jax
from jax.sharding import SingleDeviceSharding

from jaxdist import _mesh
from jaxdist._called import called, refuse
from jaxdist._devices import runtime
from jaxdist._strategies.base import Strategy
from jaxdist._strategies.over_processes import check_one_process
from jaxdist._validate import check_instance
from jaxdist.errors import DeviceError, SeveralProcessesError

PINNED_HOST = "pinned_host"


@final
class CentralStorageStrategy(Strategy):
    """A replica on each compute device; a `Variable` is on one device only.

    A step runs as with `MirroredStrategy`, and gives the same results. Between steps, one copy of
    each variable is on the parameter device. A step that uses a variable gets a copy on each
    compute device, and what it assigns is stored once. A variable has one value, so `ON_READ`
    behaves like `ON_WRITE`: the aggregation combines what the replicas assign.

    The strategy keeps only `Variable`s there. NNX modules, optimizers and other arrays that a step
    takes as arguments are on the compute devices, as with `MirroredStrategy`.

    Cost:
        Each use of a variable in a step copies it to every compute device, and each step that
        assigns it copies it back once. The compute devices hold variables only during a step.

    Args:
        compute_devices: Names or `jax.Device`s; None or `[]` means all accelerators of this
            process, or the first CPU device if there are no accelerators.
        parameter_device: The name of a device, a `jax.Device`, or `"pinned_host"`: the pinned host
            memory of the first compute device, from which copies to that device are fast. None
            means the compute device if there is one, else the first CPU device.

    Raises:
        DeviceError: Devices that do not exist, are listed twice, or are of different kinds, or
            that have no pinned host memory.
        SeveralProcessesError: In a job of several processes, devices of other processes, or
            default devices.
        ArgumentTypeError: `parameter_device` is neither a device nor a name.

    Example:
        >>> strategy = jaxdist.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:2")
        >>> with strategy.scope():
        ...     w = Variable(1.0)
        >>> strategy.run(lambda: w.assign_add(2.0))
        Array(3., dtype=float32)
        >>> w.device
        '/job:localhost/replica:0/task:0/device:CPU:2'

    Source:
        `tf.distribute.experimental.CentralStorageStrategy`.
    """

    @called("CentralStorageStrategy")
    def __init__(
        self,
        compute_devices: Sequence[str | jax.Device] | None = None,
        parameter_device: str | jax.Device | None = None,
    ) -> None:
        # A string is a sequence of letters, which would be read as names of devices.
        if isinstance(compute_devices, (str, jax.Device)):
            compute_devices = [compute_devices]
        given: Sequence[str | jax.Device] = [] if compute_devices is None else compute_devices
        named = runtime.distinct_devices(given, "compute_devices")
        layout = _mesh.build(named or _find_default_devices())
        check_one_process(layout, were_chosen=bool(named))
        on = _find_memory(layout, parameter_device)
        self._set_up(dataclasses.replace(layout, variables_on=on))


def _find_default_devices() -> list[jax.Device]:
    present = runtime.default_devices()
    # As in TensorFlow: CPU devices share their cores, so only one is used by default.
    return present[:1] if present[0].platform == "cpu" else present


def _find_memory(layout: _mesh.ReplicaMesh, given: Any) -> SingleDeviceSharding:
    """Return the device and the kind of memory that `parameter_device` names."""
    first = layout.devices[0]
    if given is None:
        alone = len(layout.devices) == 1
        return SingleDeviceSharding(first if alone else runtime.local_devices("cpu")[0])
    if isinstance(given, str) and given.strip().lower() == PINNED_HOST:
        kinds = [memory.kind for memory in first.addressable_memories()]
        if PINNED_HOST not in kinds:
            raise refuse(
                f"parameter_device={PINNED_HOST!r}, and {runtime.device_name(first)} has the "
                f"memories {kinds}.",
                f"{PINNED_HOST!r} is memory of the host that a device reads directly; JAX has it "
                "for CPUs, GPUs and TPUs.",
                "Pass parameter_device='cpu:0'.",
                kind=DeviceError,
            )
        return SingleDeviceSharding(first, memory_kind=PINNED_HOST)
    check_instance(
        "parameter_device",
        given,
        (str, jax.Device),
        f"the name of a device, a jax.Device, or {PINNED_HOST!r}",
        f"Use one of {runtime.list_device_names()}.",
    )
    device = runtime.device_from_name(given, "CentralStorageStrategy(parameter_device=...)")
    if device.process_index != layout.process.index:
        raise refuse(
            f"parameter_device={runtime.device_name(device)!r}, a device of process "
            f"{device.process_index}, and this is process {layout.process.index}.",
            "It works with the devices of one process.",
            f"Use one of {runtime.list_device_names()}.",
            kind=SeveralProcessesError,
        )
    return SingleDeviceSharding(device)
