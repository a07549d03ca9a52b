"""`topology_of`: makes the topology of devices that have coordinates."""

from collections.abc import Sequence
from typing import Protocol, TypeVar

import numpy as np

from jaxdist._called import called, refuse, refuse_type
from jaxdist._validate import as_list, show
from jaxdist.errors import TopologyError
from jaxdist.tpu._topology import Topology


class HasPlace(Protocol):
    """The coordinates of a TPU device of JAX; it may also have `slice_index`."""

    @property
    def process_index(self) -> int:
        """The process of the device."""
        ...

    @property
    def coords(self) -> Sequence[int]:
        """The coordinates of the chip: x, y, z."""
        ...

    @property
    def core_on_chip(self) -> int:
        """The index of the core on the chip."""
        ...


DeviceT = TypeVar("DeviceT", bound=HasPlace)
_REMEDY = "Pass TPU devices: jax.devices('tpu'), or those of a topology description."


@called("tpu.topology_of")
def topology_of(devices: Sequence[DeviceT]) -> tuple[Topology, list[list[DeviceT]]]:
    """Return the topology of `devices`, and the devices as `[task][ordinal]` of it.

    Each process is a task. Coordinates count from the lowest coordinates of the devices. Several
    slices are stacked in z, in the order of their `slice_index`; no links connect them.

    Args:
        devices: TPU devices of JAX, or anything with their `coords`, `core_on_chip` and
            `process_index`.

    Raises:
        TopologyError: There are no devices, processes have different numbers of devices, or two
            devices have the same coordinates.
        ArgumentTypeError: A device has no coordinates.

    Example:
        >>> cores = jaxdist.tpu.slice_of("v5e:4x2").cores
        >>> topology, devices = jaxdist.tpu.topology_of(cores)
        >>> topology, devices[1][0].coords
        (Topology(4x2x1 chips, 1 core each, 2 tasks), (2, 0, 0))
    """
    devices = as_list("devices", devices, "a list of TPU devices", _REMEDY)
    if not devices:
        raise refuse(
            "devices=[], of no devices.",
            "A topology has one device or more.",
            _REMEDY,
            kind=TopologyError,
        )
    # GPUs have `coords` from XLA, but no cores.
    placeless = [
        d for d in devices if any(getattr(d, a, None) is None for a in ("coords", "core_on_chip"))
    ]
    if placeless:
        raise refuse_type(
            f"devices of which {len(placeless)} of {len(devices)} do not say where they are: "
            f"{show(placeless[0])}.",
            "A TPU device has coords, core_on_chip and process_index.",
            _REMEDY,
        )
    places = _compute_coordinates(devices)
    by_task: dict[int, list[int]] = {}
    for i, device in enumerate(devices):
        by_task.setdefault(device.process_index, []).append(i)
    tasks = [by_task[task] for task in sorted(by_task)]
    # A topology is a rectangular array `[tasks, devices]`.
    counts = {task: len(by_task[task]) for task in sorted(by_task)}
    if len(set(counts.values())) > 1:
        raise refuse(
            f"devices of which processes have different numbers: {counts}.",
            "Every task of a topology has the same number of devices.",
            f"Leave out the devices of processes with fewer than {max(counts.values())}.",
            kind=TopologyError,
        )
    topology = Topology(mesh_shape=places.max(0) + 1, device_coordinates=places[np.array(tasks)])
    return topology, [[devices[i] for i in of_task] for of_task in tasks]


def _compute_coordinates(devices: Sequence[HasPlace]) -> np.ndarray:
    """Return coordinates in one mesh for all slices, `[devices, 4]`."""
    places = np.array([(*_pad_coordinates(d.coords), d.core_on_chip) for d in devices], np.int32)
    slices = np.array([getattr(d, "slice_index", None) or 0 for d in devices])
    for index in np.unique(slices):
        # A process may see only a part of a slice; each slice counts from its own first chip.
        mine = slices == index
        places[mine, :3] -= places[mine, :3].min(0)
    # The indices of slices may have gaps, so a slice is moved by the rank of its index.
    depth = int(places[:, 2].max()) + 1
    places[:, 2] += np.searchsorted(np.unique(slices), slices) * depth
    return places


def _pad_coordinates(coords: Sequence[int]) -> tuple[int, ...]:
    return (*coords, 0, 0)[:3]
