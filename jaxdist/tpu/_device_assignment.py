"""`DeviceAssignment`: the cores of each replica."""

import functools
from typing import Any, Final, final

import numpy as np

from jaxdist._called import call_as, called, refuse, refuse_type
from jaxdist._validate import show
from jaxdist.errors import CoordinateError, TopologyError
from jaxdist.tpu import _build
from jaxdist.tpu._options import DeviceOrderMode
from jaxdist.tpu._topology import Topology, as_integers, check_job, topology_of_bytes

# The core assignment of one replica on one core.
SINGLE_CORE_ASSIGNMENT: Final = [[[0, 0, 0, 0]]]


@final
class DeviceAssignment:
    """The core of each logical device of each replica, in a topology.

    Prefer `DeviceAssignment.build`, which places replicas over the slice.

    Shapes:
        `core_assignment` is `[replicas, logical devices of a replica, 4]`.

    Args:
        topology: The slice.
        core_assignment: Coordinates of the core of each logical device of each replica.

    Raises:
        TopologyError: `topology` is not a `Topology`, the array has another shape, or two logical
            devices have the same core.
        CoordinateError: A core is outside the mesh or missing.

    Example:
        >>> topology = jaxdist.tpu.slice_of("v4:2x2x1").topology
        >>> assignment = jaxdist.tpu.experimental.DeviceAssignment.build(
        ...     topology, computation_shape=[1, 1, 1, 2], num_replicas=4)
        >>> assignment
        DeviceAssignment(4 replicas x 2 cores: 0000,0001|1000,1001|1100,1101|0100,0101)
        >>> assignment.coordinates(2, 1)
        (1, 1, 0, 1)

    Source:
        `tf.tpu.experimental.DeviceAssignment`.
    """

    @called("DeviceAssignment")
    def __init__(self, topology: Topology, core_assignment: Any) -> None:
        _check_topology(topology)
        cores = as_integers("DeviceAssignment: core_assignment", core_assignment)
        if cores.ndim != 3 or cores.shape[2] != topology.mesh_rank:
            raise TopologyError(
                f"DeviceAssignment: core_assignment has shape {list(cores.shape)}.\n\n"
                f"Its shape is [replicas, cores of a replica, {topology.mesh_rank}].\n\n"
                "For one replica on one core pass [[[0, 0, 0, 0]]]."
            )
        self._topology = topology
        self._cores = cores
        self._check_cores()

    def _check_cores(self) -> None:
        """Raise an error if a core is missing or runs two logical devices."""
        places = self._cores.reshape(-1, self._cores.shape[2])
        # This test is vectorized, for thousands of cores; the loop below only finds the error.
        if _are_distinct_and_present(self._topology, places):
            return
        seen: dict[tuple[int, ...], tuple[int, int]] = {}
        for replica, logical in np.ndindex(*self._cores.shape[:2]):
            name = f"DeviceAssignment: core_assignment[{replica}][{logical}]"
            # Raises if the core is outside the mesh or missing.
            place = call_as(name, self._topology.present, self._cores[replica, logical].tolist())
            if place in seen:
                first = "][".join(map(str, seen[place]))
                raise TopologyError(
                    f"DeviceAssignment: core_assignment[{first}] and [{replica}][{logical}] are "
                    "both "
                    f"{list(place)}.\n\nA core runs one logical device.\n\n"
                    "Give one of them another core."
                )
            seen[place] = (replica, logical)

    @functools.cached_property
    def _replicas_of(self) -> dict[tuple[int, int], list[int]]:
        """For each `(task, logical device)`, the replicas that have this device on this task."""
        tasks, _ = self._topology.tasks_and_ordinals(self._cores)
        found: dict[tuple[int, int], list[int]] = {}
        for (replica, logical), task in np.ndenumerate(tasks):
            found.setdefault((int(task), logical), []).append(replica)
        return found

    @staticmethod
    @called("DeviceAssignment.build")
    def build(
        topology: Topology | bytes,
        computation_shape: Any = None,
        computation_stride: Any = None,
        num_replicas: int = 1,
        device_order_mode: DeviceOrderMode | int = DeviceOrderMode.AUTO,
    ) -> "DeviceAssignment":
        """Place replicas over a slice so that consecutive replicas are close together.

        If devices are missing, replicas get devices task by task.

        Args:
            topology: The slice, or its `serialized()` bytes.
            computation_shape: Cores of one replica in x, y, z and on a chip; None for one core.
            computation_stride: Distance between two cores of one replica in each dim; None for 1.
            num_replicas: Number of replicas; other cores stay unused.
            device_order_mode: The order of replicas, and of the cores of each replica.

        Returns:
            The assignment.

        Raises:
            TopologyError: Sizes are not 4 positive numbers, a replica is larger than the mesh,
                more replicas are requested than fit, or `DeviceOrderMode.RING` finds no ring.
            ArgumentError: The number of replicas is negative, or the order mode is not valid.
            ArgumentTypeError: A value is not an integer.

        Example:
            >>> topology = jaxdist.tpu.slice_of("v5e:4x2").topology
            >>> build = jaxdist.tpu.experimental.DeviceAssignment.build
            >>> assignment = build(topology, num_replicas=8)
            >>> assignment
            DeviceAssignment(8 replicas x 1 core: 0000|1000|2000|3000|3100|2100|1100|0100)

        Source:
            `tf.tpu.experimental.DeviceAssignment.build`.
        """
        # As in TensorFlow, a serialized topology may be passed.
        if isinstance(topology, bytes):
            topology = topology_of_bytes(topology, "DeviceAssignment.build(topology=...)")
        _check_topology(topology)
        try:
            mode = DeviceOrderMode(device_order_mode)
        except ValueError:
            raise refuse(
                f"device_order_mode={show(device_order_mode)}.",
                "device_order_mode is one of "
                f"{', '.join(f'DeviceOrderMode.{m.name} ({m.value})' for m in DeviceOrderMode)}.",
                "Pass one of them, or leave it out for AUTO.",
            ) from None
        cores = _build.compute_core_assignment(
            topology, computation_shape, computation_stride, num_replicas, mode
        )
        return DeviceAssignment(topology, cores)

    @property
    def topology(self) -> Topology:
        """The slice."""
        return self._topology

    @property
    def num_replicas(self) -> int:
        """Number of replicas."""
        return self._cores.shape[0]

    @property
    def num_cores_per_replica(self) -> int:
        """Logical devices of each replica."""
        return self._cores.shape[1]

    @property
    def core_assignment(self) -> np.ndarray:
        """Coordinates of every used core; int32 `[replicas, logical devices, 4]`."""
        return self._cores

    @called("coordinates")
    def coordinates(self, replica: int, logical_core: int) -> tuple[int, ...]:
        """Return the coordinates of logical device `logical_core` of `replica`.

        Raises:
            CoordinateError: The replica or the logical device does not exist.

        Example:
            >>> topology = jaxdist.tpu.slice_of("v5e:2x2").topology
            >>> assignment = jaxdist.tpu.experimental.DeviceAssignment.build(topology)
            >>> assignment.coordinates(0, 0)
            (0, 0, 0, 0)
        """
        return self._get_coordinates(replica, logical_core)

    @called("lookup_replicas")
    def lookup_replicas(self, task_id: int, logical_core: int) -> list[int]:
        """Return the replicas whose logical device `logical_core` is on task `task_id`.

        Raises:
            TopologyError: No replica has this logical device on this task.

        Example:
            >>> topology = jaxdist.tpu.slice_of("v4:2x2x2").topology
            >>> build = jaxdist.tpu.experimental.DeviceAssignment.build
            >>> assignment = build(topology, num_replicas=16)
            >>> assignment.lookup_replicas(1, 0)
            [8, 9, 10, 11, 12, 13, 14, 15]
        """
        _check_integer("task_id", task_id)
        _check_integer("logical_core", logical_core)
        found = self._replicas_of.get((task_id, logical_core))
        if found is None:
            there = sorted({task for task, logical in self._replicas_of})
            raise refuse(
                f"task_id={task_id} and logical_core={logical_core}, and no replica has its "
                f"logical device {logical_core} on task {task_id}.",
                f"Tasks with replicas are {there[:8]}{' ...' if len(there) > 8 else ''}; logical "
                f"devices are 0 to {self.num_cores_per_replica - 1}.",
                f"Pass for instance task_id={there[0]}, logical_core=0." if there else _EMPTY,
                kind=TopologyError,
            )
        return list(found)

    @called("tpu_ordinal")
    def tpu_ordinal(self, replica: int = 0, logical_core: int = 0) -> int:
        """Return the index of a logical device among the devices of its task.

        Raises:
            CoordinateError: The replica or the logical device does not exist.

        Example:
            >>> topology = jaxdist.tpu.slice_of("v5e:2x2").topology
            >>> build = jaxdist.tpu.experimental.DeviceAssignment.build
            >>> assignment = build(topology, num_replicas=4)
            >>> assignment.tpu_ordinal(2)
            3
        """
        place = self._get_coordinates(replica, logical_core)
        return self._topology.tpu_device_ordinal_at_coordinates(place)

    @called("host_device")
    def host_device(self, replica: int = 0, logical_core: int = 0, job: str | None = None) -> str:
        """Return the name of the host of a logical device.

        Raises:
            CoordinateError: The replica or the logical device does not exist.

        Example:
            >>> topology = jaxdist.tpu.slice_of("v5e:2x2").topology
            >>> assignment = jaxdist.tpu.experimental.DeviceAssignment.build(topology)
            >>> assignment.host_device(job="worker")
            '/job:worker/task:0/device:CPU:0'
        """
        place = self._get_coordinates(replica, logical_core)
        check_job(job)
        return self._topology.cpu_device_name_at_coordinates(place, job)

    @called("tpu_device")
    def tpu_device(self, replica: int = 0, logical_core: int = 0, job: str | None = None) -> str:
        """Return the name of the TPU core of a logical device.

        Raises:
            CoordinateError: The replica or the logical device does not exist.

        Example:
            >>> topology = jaxdist.tpu.slice_of("v5e:2x2").topology
            >>> assignment = jaxdist.tpu.experimental.DeviceAssignment.build(topology)
            >>> assignment.tpu_device()
            '/task:0/device:TPU:0'
        """
        place = self._get_coordinates(replica, logical_core)
        check_job(job)
        return self._topology.tpu_device_name_at_coordinates(place, job)

    def _get_coordinates(self, replica: int, logical_core: int) -> tuple[int, ...]:
        for name, index, size in (
            ("replica", replica, self.num_replicas),
            ("logical_core", logical_core, self.num_cores_per_replica),
        ):
            _check_integer(name, index)
            if not 0 <= index < size:
                raise refuse(
                    f"{name}={index}, and this assignment has {self.num_replicas} replica(s) of "
                    f"{self.num_cores_per_replica} core(s).",
                    f"{name} is a number from 0 to {size - 1}.",
                    f"Pass for instance {name}=0." if size else _EMPTY,
                    kind=CoordinateError,
                )
        return tuple(self._cores[replica, logical_core].tolist())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DeviceAssignment):
            return NotImplemented
        return self._topology == other._topology and np.array_equal(self._cores, other._cores)

    def __hash__(self) -> int:
        return hash((self._topology, self._cores.tobytes()))

    def __repr__(self) -> str:
        cores = self.num_cores_per_replica
        shown = [
            ",".join("".join(map(str, place)) for place in replica)
            for replica in self._cores[:16].tolist()
        ]
        more = "|..." if self.num_replicas > 16 else ""
        return (
            f"DeviceAssignment({self.num_replicas} replica{'s' * (self.num_replicas != 1)} x "
            f"{cores} core{'s' * (cores != 1)}: {'|'.join(shown)}{more})"
        )


def _are_distinct_and_present(topology: Topology, places: np.ndarray) -> bool:
    """Whether all places are inside the mesh, have a device, and are distinct."""
    if not len(places):
        return True
    if (places < 0).any() or (places >= topology.mesh_shape).any():
        return False
    tasks, _ = topology.tasks_and_ordinals(places)
    return bool((tasks >= 0).all()) and len(np.unique(places, axis=0)) == len(places)


_EMPTY = "Build the assignment with num_replicas=1 or more."


def _check_integer(name: str, index: Any) -> None:
    if isinstance(index, bool) or not isinstance(index, (int, np.integer)):
        raise refuse_type(
            f"{name}={show(index)}.",
            "Tasks, replicas and their logical devices are numbered from 0.",
            f"Pass for instance {name}=0.",
        )


def _check_topology(topology: Any) -> None:
    if not isinstance(topology, Topology):
        raise refuse(
            f"topology={show(topology)}.",
            "topology is a Topology.",
            "Pass what jaxdist.tpu.experimental.initialize_tpu_system(resolver) returned.",
            kind=TopologyError,
        )
