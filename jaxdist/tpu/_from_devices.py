"""The topology of devices that say where they are."""

from collections.abc import Sequence
from typing import Protocol, TypeVar

import numpy as np

from jaxdist._validate import as_list, shown
from jaxdist.errors import ArgumentTypeError, TopologyError
from jaxdist.tpu._topology import Topology


class HasPlace(Protocol):
    """What a TPU device of JAX says of itself; `slice_index` only where there are slices."""

    @property
    def process_index(self) -> int:
        """The process that drives it."""
        ...

    @property
    def coords(self) -> Sequence[int]:
        """The chip: x, y, z."""
        ...

    @property
    def core_on_chip(self) -> int:
        """Which core of the chip."""
        ...


DeviceT = TypeVar("DeviceT", bound=HasPlace)
_REMEDY = "Pass TPU devices: jax.devices('tpu'), or those of a topology description."


def topology_of(devices: Sequence[DeviceT]) -> tuple[Topology, list[list[DeviceT]]]:
    """The topology of `devices`, and the devices as `[task][ordinal]` of it.

    Processes are the tasks. Coordinates count from the first chip that is there. Several slices
    lie behind one another in z, in the order of their `slice_index`; there is no wire between
    them.

    Args:
        devices: TPU devices of JAX, or anything with their `coords`, `core_on_chip` and
            `process_index`.

    Raises:
        TopologyError: No device, processes with different numbers of devices, or two devices at
            one place.
        ArgumentTypeError: Devices that do not say where they are.

    Example:
        >>> cores = jaxdist.tpu.slice_of("v5e:4x2").cores
        >>> topology, devices = jaxdist.tpu.topology_of(cores)
        >>> topology, devices[1][0].coords
        (Topology(4x2x1 chips, 1 core each, 2 tasks), (2, 0, 0))
    """
    devices = as_list("tpu.topology_of", "devices", devices, "a list of TPU devices", _REMEDY)
    if not devices:
        raise TopologyError(
            "tpu.topology_of was given devices=[], of no devices.\n\n"
            f"A topology has one device or more.\n\n{_REMEDY}"
        )
    placeless = [d for d in devices if getattr(d, "coords", None) is None]
    if placeless:
        raise ArgumentTypeError(
            f"tpu.topology_of was given devices of which {len(placeless)} of {len(devices)} do "
            f"not say where they are: {shown(placeless[0])}.\n\n"
            "A TPU device has coords, core_on_chip and process_index.\n\n"
            f"{_REMEDY}"
        )
    places = _compute_coordinates(devices)
    by_task: dict[int, list[int]] = {}
    for i, device in enumerate(devices):
        by_task.setdefault(device.process_index, []).append(i)
    tasks = [by_task[task] for task in sorted(by_task)]
    counts = {task: len(by_task[task]) for task in sorted(by_task)}
    if len(set(counts.values())) > 1:
        raise TopologyError(
            "tpu.topology_of was given devices of which processes have different numbers: "
            f"{counts}.\n\nEvery task of a topology has the same number of devices.\n\n"
            f"Leave out the devices of processes with fewer than {max(counts.values())}."
        )
    topology = Topology(mesh_shape=places.max(0) + 1, device_coordinates=places[np.array(tasks)])
    return topology, [[devices[i] for i in of_task] for of_task in tasks]


def _compute_coordinates(devices: Sequence[HasPlace]) -> np.ndarray:
    """Coordinates in one mesh for all slices, `[devices, 4]`."""
    places = np.array([(*_pad_coordinates(d.coords), d.core_on_chip) for d in devices], np.int32)
    slices = np.array([getattr(d, "slice_index", None) or 0 for d in devices])
    for index in np.unique(slices):
        mine = slices == index
        places[mine, :3] -= places[mine, :3].min(0)
    depth = int(places[:, 2].max()) + 1
    places[:, 2] += np.searchsorted(np.unique(slices), slices) * depth
    return places


def _pad_coordinates(coords: Sequence[int]) -> tuple[int, ...]:
    return (*coords, 0, 0)[:3]
