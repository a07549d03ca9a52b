"""`TPUSystem`: the devices of a resolver, their topology and their hardware."""

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any, NamedTuple, final

import numpy as np

from jaxdist import _devices
from jaxdist._called import called, name_call
from jaxdist._validate import check_text
from jaxdist.errors import NotFoundError, TopologyError
from jaxdist.tpu._slice import Slice, slice_of, topology_of
from jaxdist.tpu._topology import Topology


class EmbeddingFeature(enum.Enum):
    """The hardware of a chip for embedding tables."""

    UNSUPPORTED = "UNSUPPORTED"
    V1 = "V1"
    V2 = "V2"


# SparseCores per chip: cloud.google.com/tpu/docs, pages v4, v5p and v6e. V1 is the earlier
# technique, which uses the TensorCores of v2 and v3.
_FEATURES = {
    "v2": (EmbeddingFeature.V1, 0),
    "v3": (EmbeddingFeature.V1, 0),
    "v4": (EmbeddingFeature.V2, 4),
    "v5p": (EmbeddingFeature.V2, 4),
    "v6e": (EmbeddingFeature.V2, 2),
}
# JAX's `device_kind`, if it differs from the name of the generation.
_KINDS = {"v5": "v5p", "v5 lite": "v5e", "v5lite": "v5e", "v6 lite": "v6e"}


@final
class HardwareFeature:
    """The features of the chips of a generation besides matrix products.

    Args:
        kind: The generation, such as `v5e`, or JAX's `device_kind`, such as `TPU v5 lite`.

    Example:
        >>> feature = jaxdist.tpu.experimental.HardwareFeature("TPU v5")
        >>> feature.embedding_feature.name, feature.num_embedding_devices_per_chip
        ('V2', 4)

    Source:
        `tf.tpu.experimental.HardwareFeature`.
    """

    EmbeddingFeature = EmbeddingFeature

    @called("HardwareFeature")
    def __init__(self, kind: str) -> None:
        check_text("kind", kind, "v5e")
        name = kind.removeprefix("TPU ").lower()
        self._feature, self._devices = _FEATURES.get(
            _KINDS.get(name, name), (EmbeddingFeature.UNSUPPORTED, 0)
        )

    @property
    def embedding_feature(self) -> EmbeddingFeature:
        """The hardware for embedding tables."""
        return self._feature

    @property
    def num_embedding_devices_per_chip(self) -> int:
        """Number of SparseCores of a chip."""
        return self._devices


VIRTUAL, DESCRIBED = "virtual:", "described:"


class TPUSystemMetadata(NamedTuple):
    """The numbers of cores and hosts of a TPU system, its topology and its devices.

    Example:
        >>> resolver = jaxdist.cluster_resolver.TPUClusterResolver("virtual:v4:2x2x1")
        >>> data = resolver.get_tpu_system_metadata()
        >>> data.num_cores, data.num_hosts, data.num_of_cores_per_host
        (8, 1, 8)

    Source:
        `tf.tpu.experimental.TPUSystemMetadata`.
    """

    num_cores: int
    num_hosts: int
    num_of_cores_per_host: int
    topology: Topology | None
    devices: tuple[Any, ...]


@final
@dataclasses.dataclass(frozen=True)
class TPUSystem:
    """The devices of a TPU system and their topology; `resolver.tpu_system` returns it.

    Example:
        >>> system = jaxdist.cluster_resolver.TPUClusterResolver("virtual:v5e:2x4").tpu_system
        >>> system.topology
        Topology(2x4x1 chips, 1 core each, 2 tasks)
        >>> system.device_at([1, 3, 0, 0]).id
        7
    """

    name: str
    topology: Topology
    # Indexed by `[task][ordinal]` of the topology.
    devices: tuple[tuple[Any, ...], ...]

    @property
    def is_described(self) -> bool:
        """Whether programs can only be compiled for the system, not run on it."""
        return self.name.startswith(DESCRIBED)

    def device_at(self, coordinates: Sequence[int]) -> Any:
        """Return the device at coordinates of the topology."""
        task = self.topology.task_ordinal_at_coordinates(coordinates)
        return self.devices[task][self.topology.tpu_device_ordinal_at_coordinates(coordinates)]

    def device_grid(self, core_assignment: np.ndarray) -> np.ndarray:
        """Return the device of each logical device: `[replicas, logical devices]`."""
        tasks, ordinals = self.topology.tasks_and_ordinals(core_assignment)
        grid = np.empty(core_assignment.shape[:2], dtype=object)
        for place, task, ordinal in zip(
            np.ndindex(*grid.shape), tasks.flat, ordinals.flat, strict=True
        ):
            grid[place] = self.devices[task][ordinal]
        return grid

    @property
    def num_slices(self) -> int:
        """The number of slices.

        Example:
            >>> resolver = jaxdist.cluster_resolver.TPUClusterResolver("virtual:v5e:2x2*2")
            >>> resolver.tpu_system.num_slices
            2
        """
        if self._slice is not None:
            return self._slice.num_slices
        return len({getattr(d, "slice_index", None) or 0 for d in self.metadata.devices})

    @property
    def _slice(self) -> Slice | None:
        """The slice that the name of a virtual or described system has."""
        prefix, _, rest = self.name.partition(":")
        return slice_of(rest) if f"{prefix}:" in (VIRTUAL, DESCRIBED) else None

    @property
    def metadata(self) -> TPUSystemMetadata:
        """Numbers of cores and hosts, and the devices, host by host."""
        devices = tuple(d for of_task in self.devices for d in of_task)
        hosts, cores = self.topology.num_tasks, self.topology.num_tpus_per_task
        return TPUSystemMetadata(len(devices), hosts, cores, self.topology, devices)

    @property
    def hardware_feature(self) -> HardwareFeature:
        """The features of the chips besides matrix products."""
        # Virtual slices have the `device_kind` of a CPU, so the name of the slice decides.
        if self._slice is not None:
            return HardwareFeature(self._slice.generation)
        return HardwareFeature(self.devices[0][0].device_kind)


def find(name: str) -> TPUSystem:
    """Find the system of a resolver's name: `local`, `virtual:v4:2x2x1`, `described:v5e:4x4`.

    Raises:
        NotFoundError: No TPU was found, or a virtual slice needs more CPU devices.
        TopologyError: The slice does not exist, or libtpu does not describe it.
        MissingExtraError: A description needs libtpu, which is not installed.
    """
    if name.startswith(VIRTUAL):
        return _find_virtual(name)
    devices = _find_described(name) if name.startswith(DESCRIBED) else _find_local()
    topology, grid = topology_of(devices)
    return TPUSystem(name, topology, tuple(map(tuple, grid)))


def _find_virtual(name: str) -> TPUSystem:
    layout = slice_of(name.removeprefix(VIRTUAL))
    cpus = _devices.chips.cpus()
    if len(cpus) < layout.num_cores:
        raise NotFoundError(
            f"{name!r} needs {layout.num_cores} CPU devices, one for each core, and JAX shows "
            f"{len(cpus)}.\n\n"
            "JAX fixes the number of CPU devices when it first uses a device.\n\n"
            "Right after the imports call "
            f"jaxdist.testing.virtual_devices({layout.num_cores})."
        )
    # CPU devices have no coordinates. CPU device i stands for core i of the slice.
    topology, grid = topology_of(layout.cores)
    return TPUSystem(name, topology, tuple(tuple(cpus[c.id] for c in task) for task in grid))


def _find_described(name: str) -> list[Any]:
    layout = slice_of(name.removeprefix(DESCRIBED))
    try:
        return _devices.chips.describe_slice(layout.name, layout.num_slices, layout.wrap)
    except _devices.chips.NotDescribedError as error:
        raise TopologyError(
            f"libtpu {error.version} does not describe {layout.name!r}: {error}\n\n"
            "A slice can be described where the installed libtpu knows it.\n\n"
            "Choose a slice that exists, or install a newer libtpu: pip install -U libtpu."
        ) from None


def _find_local() -> list[Any]:
    devices, reason = _devices.chips.tpus()
    if not devices:
        raise NotFoundError(
            f"No TPU was found for {name_call()}. What was looked for: the TPU chips of this "
            f"machine, through JAX; JAX reported: {reason}\n\n{_devices.chips.describe_search()}"
            "\n\nOn a TPU VM or in Colab with a TPU runtime, install jax[tpu] and restart. "
            "Without a TPU use TPUClusterResolver('virtual:v5e:2x4'), which lays CPU devices out "
            "as that slice, or 'described:v5e:2x4' to compile only."
        )
    return devices
