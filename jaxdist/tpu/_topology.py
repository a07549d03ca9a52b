"""`Topology`: the coordinates of the cores of a TPU slice, and their tasks."""

import math
from collections.abc import Sequence
from typing import Any, final

import numpy as np

from jaxdist._called import call_as, called, name_call, refuse, refuse_type
from jaxdist._validate import check_text, show
from jaxdist.errors import ArgumentTypeError, CoordinateError, TopologyError
from jaxdist.tpu import _serialized
from jaxdist.tpu._serialized import TopologyFields

AXES = ("x", "y", "z", "core")
# Bounds the memory that invalid bytes or a typo in a size can allocate.
_LARGEST = 2**22


@final
class Topology:
    """The coordinates of the cores of a TPU slice: x, y, z of the chip, and the core on it.

    It is cheap and immutable: it holds integers, not devices.

    Shapes:
        `mesh_shape` is `[4]`, `device_coordinates` `[tasks, devices of a task, 4]`.

    Args:
        serialized: Bytes from `serialized()` of this class or of TensorFlow's class, instead of
            the other two arguments.
        mesh_shape: Size of the slice in x, y, z, and cores of a chip.
        device_coordinates: The coordinates of each device of each task, in order. Places of the
            mesh without a device are missing devices.

    Raises:
        ArgumentTypeError: Neither `serialized` nor the other two are given, or a value is not an
            integer.
        TopologyError: The mesh does not have 4 positive sizes, the coordinates have another shape,
            two devices have the same coordinates, or the bytes are not a topology.
        CoordinateError: A device is outside the mesh, or `device_coordinates` is not 3-D.

    Example:
        >>> two_chips = jaxdist.tpu.experimental.Topology(
        ...     mesh_shape=[2, 1, 1, 1], device_coordinates=[[[0, 0, 0, 0], [1, 0, 0, 0]]])
        >>> two_chips
        Topology(2x1x1 chips, 1 core each, 1 task)
        >>> two_chips.tpu_device_name_at_coordinates([1, 0, 0, 0], job="worker")
        '/job:worker/task:0/device:TPU:1'
        >>> type(two_chips)(serialized=two_chips.serialized()) == two_chips
        True

    Source:
        `tf.tpu.experimental.Topology`.
    """

    @called("Topology")
    def __init__(
        self,
        serialized: bytes | None = None,
        mesh_shape: Sequence[int] | np.ndarray | None = None,
        device_coordinates: Any = None,
    ) -> None:
        if serialized is not None:
            if mesh_shape is not None or device_coordinates is not None:
                raise refuse(
                    "serialized and mesh_shape or device_coordinates.",
                    "The bytes hold mesh_shape and device_coordinates already.",
                    "Pass serialized alone, or the other two.",
                    kind=TopologyError,
                )
            mesh_shape, device_coordinates = call_as("Topology(serialized=...)", _parse, serialized)
        elif mesh_shape is None or device_coordinates is None:
            missing = "mesh_shape" if mesh_shape is None else "device_coordinates"
            raise refuse_type(
                f"neither serialized nor {missing}.",
                "It needs serialized, or mesh_shape and device_coordinates.",
                "Pass for instance Topology(mesh_shape=[1, 1, 1, 1], device_coordinates=[[[0, 0, "
                "0, 0]]]).",
            )
        self._mesh_shape = _validate_mesh(mesh_shape)
        self._coordinates = _validate_coordinates(device_coordinates, self._mesh_shape)
        self._tasks, self._ordinals = _invert(self._mesh_shape, self._coordinates)
        self._missing = np.argwhere(self._tasks < 0)
        # Topologies are hashed and shared, so their arrays must not change.
        for array in (self._tasks, self._ordinals, self._missing):
            array.setflags(write=False)

    @property
    def mesh_shape(self) -> np.ndarray:
        """Size of the slice in x, y, z, and cores of a chip; int32 `[4]`."""
        return self._mesh_shape

    @property
    def mesh_rank(self) -> int:
        """Number of dims of the mesh: 4."""
        return len(self._mesh_shape)

    @property
    def device_coordinates(self) -> np.ndarray:
        """Coordinates of every device; int32 `[tasks, devices of a task, 4]`."""
        return self._coordinates

    @property
    def missing_devices(self) -> np.ndarray:
        """Places of the mesh without a device; `[missing, 4]`."""
        return self._missing

    @property
    def num_tasks(self) -> int:
        """Number of tasks: the hosts of the chips."""
        return self._coordinates.shape[0]

    @property
    def num_tpus_per_task(self) -> int:
        """Number of devices of each task."""
        return self._coordinates.shape[1]

    @called("task_ordinal_at_coordinates")
    def task_ordinal_at_coordinates(self, device_coordinates: Sequence[int]) -> int:
        """Return the task of the device at these coordinates; -1 for a missing device.

        Raises:
            CoordinateError: The coordinates are outside the mesh.

        Example:
            >>> topology = jaxdist.tpu.slice_of("v4:2x2x2").topology
            >>> topology.task_ordinal_at_coordinates([0, 0, 1, 0])
            1
        """
        place = self.place(device_coordinates)
        return int(self._tasks[place])

    @called("tpu_device_ordinal_at_coordinates")
    def tpu_device_ordinal_at_coordinates(self, device_coordinates: Sequence[int]) -> int:
        """Return the index in its task of the device at these coordinates; -1 for a missing device.

        Raises:
            CoordinateError: The coordinates are outside the mesh.

        Example:
            >>> topology = jaxdist.tpu.slice_of("v4:2x2x2").topology
            >>> topology.tpu_device_ordinal_at_coordinates([1, 0, 1, 1])
            3
        """
        place = self.place(device_coordinates)
        return int(self._ordinals[place])

    @called("Topology.tasks_and_ordinals")
    def tasks_and_ordinals(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return tasks and ordinals for many coordinates `[..., 4]` inside the mesh.

        Example:
            >>> topology = jaxdist.tpu.slice_of("v4:2x2x2").topology
            >>> topology.tasks_and_ordinals(np.array([[0, 0, 1, 0], [1, 0, 1, 1]]))
            (array([1, 1], dtype=int32), array([0, 3], dtype=int32))
        """
        given = as_integers("Topology.tasks_and_ordinals: places", places)
        sizes = self._mesh_shape
        if not given.ndim or given.shape[-1] != len(sizes):
            raise refuse(
                f"places of shape {list(given.shape)}.",
                f"The last dim of places is {len(sizes)} coordinates: {', '.join(AXES)}.",
                "Pass for instance places=[[0, 0, 0, 0]].",
                kind=CoordinateError,
            )
        outside = given[((given < 0) | (given >= sizes)).any(axis=-1)]
        if len(outside):
            raise refuse(
                f"places with {outside[0].tolist()}, and the mesh is {sizes.tolist()} in "
                f"{', '.join(AXES)}.",
                "Coordinates count from 0.",
                f"Pass coordinates up to {(sizes - 1).tolist()}.",
                kind=CoordinateError,
            )
        index = tuple(np.moveaxis(given, -1, 0))
        return self._tasks[index], self._ordinals[index]

    @called("cpu_device_name_at_coordinates")
    def cpu_device_name_at_coordinates(
        self, device_coordinates: Sequence[int], job: str | None = None
    ) -> str:
        """Return the name of the host of the device at these coordinates.

        Raises:
            CoordinateError: The coordinates are outside the mesh, or the device is missing.

        Example:
            >>> topology = jaxdist.tpu.slice_of("v4:2x2x2").topology
            >>> topology.cpu_device_name_at_coordinates([0, 0, 1, 0])
            '/task:1/device:CPU:0'
        """
        place = self.present(device_coordinates)
        check_job(job)
        return f"{_format_job(job)}/task:{self._tasks[place]}/device:CPU:0"

    @called("tpu_device_name_at_coordinates")
    def tpu_device_name_at_coordinates(
        self, device_coordinates: Sequence[int], job: str | None = None
    ) -> str:
        """Return the name of the device at these coordinates.

        Raises:
            CoordinateError: The coordinates are outside the mesh, or the device is missing.

        Example:
            >>> topology = jaxdist.tpu.slice_of("v4:2x2x2").topology
            >>> topology.tpu_device_name_at_coordinates([1, 0, 1, 1], "worker")
            '/job:worker/task:1/device:TPU:3'
        """
        place = self.present(device_coordinates)
        check_job(job)
        return f"{_format_job(job)}/task:{self._tasks[place]}/device:TPU:{self._ordinals[place]}"

    def serialized(self) -> bytes:
        """Return the topology as bytes, which TensorFlow can read.

        Example:
            >>> topology = jaxdist.tpu.slice_of("v5e:4x4").topology
            >>> type(topology)(serialized=topology.serialized()) == topology
            True
        """
        tasks, devices, _ = self._coordinates.shape
        flat = self._coordinates.ravel().tolist()
        return _serialized.write(TopologyFields(self._mesh_shape.tolist(), tasks, devices, flat))

    def place(self, coordinates: Sequence[int]) -> tuple[int, ...]:
        """Return `coordinates` as an index into the mesh."""
        caller = name_call()
        given = as_integers(f"{caller}: device_coordinates", coordinates)
        place = tuple(given.ravel().tolist())
        sizes = tuple(self._mesh_shape.tolist())
        if given.ndim != 1 or len(place) != len(sizes) or not _is_inside(place, sizes):
            raise refuse(
                f"device_coordinates={given.tolist()}, and the mesh is {list(sizes)} in "
                f"{', '.join(AXES)}.",
                f"device_coordinates has {len(sizes)} integers, from 0 to {[s - 1 for s in sizes]}"
                ".",
                f"Pass for instance {[0] * len(sizes)}.",
                kind=CoordinateError,
            )
        return place

    def present(self, coordinates: Sequence[int]) -> tuple[int, ...]:
        """Return `coordinates` as an index into the mesh; raise for a missing device."""
        place = self.place(coordinates)
        if self._tasks[place] < 0:
            raise refuse(
                f"device_coordinates={list(place)}, and no device has these coordinates: this "
                f"topology lacks {len(self._missing)} of {self._tasks.size} devices, at "
                f"{self._missing[:8].tolist()}{' ...' if len(self._missing) > 8 else ''}.",
                "Only present devices have a name.",
                "Choose coordinates that are in Topology.device_coordinates.",
                kind=CoordinateError,
            )
        return place

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Topology):
            return NotImplemented
        return np.array_equal(self._mesh_shape, other._mesh_shape) and np.array_equal(
            self._coordinates, other._coordinates
        )

    def __hash__(self) -> int:
        return hash((self._mesh_shape.tobytes(), self._coordinates.tobytes()))

    def __repr__(self) -> str:
        *chips, cores = self._mesh_shape.tolist()
        shape = "x".join(map(str, chips))
        lacking = f", {len(self._missing)} missing" if len(self._missing) else ""
        return (
            f"Topology({shape} chips, {cores} core{'s' * (cores > 1)} each, {self.num_tasks} "
            f"task{'s' * (self.num_tasks != 1)}{lacking})"
        )


@called("tpu.topology_of_bytes")
def topology_of_bytes(
    serialized: Any, caller: str = "tpu.topology_of_bytes(serialized=...)"
) -> Topology:
    """Return the topology that bytes describe.

    Args:
        serialized: The result of `Topology.serialized()`.
        caller: The name that errors show instead of this function's.

    Raises:
        ArgumentTypeError: `serialized` is not bytes.
        TopologyError: The bytes are not a topology.

    Example:
        >>> topology = jaxdist.tpu.slice_of("v5e:2x2").topology
        >>> jaxdist.tpu.topology_of_bytes(topology.serialized()).mesh_shape
        array([2, 2, 1, 1], dtype=int32)
    """
    check_text("caller", caller, "my_function")
    mesh_shape, coordinates = call_as(caller, _parse, serialized)
    return Topology(mesh_shape=mesh_shape, device_coordinates=coordinates)


def check_job(job: Any) -> None:
    """Raise if `job` is neither None nor a string."""
    if job is not None:
        check_text("job", job, "worker")


def _format_job(job: str | None) -> str:
    return "" if job is None else f"/job:{job}"


def _is_inside(place: Sequence[int], sizes: Sequence[int]) -> bool:
    return all(0 <= c < size for c, size in zip(place, sizes, strict=True))


@called(lambda name: name)
def as_integers(name: str, value: Any) -> np.ndarray:
    """Return a read-only int32 copy of `value`; errors name it `name`."""
    try:
        array = np.asarray(value)
    except ArgumentTypeError as error:
        # Types of jaxdist (a `PerReplica`) raise it when NumPy converts them.
        raise refuse_type(
            f"as {show(value)}.", "It is made of integers.", "Pass a list or an array of integers."
        ) from error
    except ValueError as error:
        raise TopologyError(
            f"{name} is ragged: {error}.\n\nAll rows need one length.\n\n"
            "Pass a list or an array of integers."
        ) from None
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise refuse_type(
            f"as {show(value)}: its dtype is {array.dtype}.",
            "It is made of integers.",
            "Pass a list or an array of integers.",
        )
    if array.size and (array.max() > _LARGEST or array.min() < -_LARGEST):
        raise TopologyError(
            f"{name} holds {array.max()} and {array.min()} as its largest and smallest number.\n\n"
            f"Coordinates and sizes of a slice are at most {_LARGEST}.\n\n"
            "Pass smaller numbers."
        )
    # A copy: the caller may change the given array later.
    array = array.astype(np.int32)
    array.setflags(write=False)
    return array


def _validate_mesh(mesh_shape: Any) -> np.ndarray:
    shape = as_integers("Topology: mesh_shape", mesh_shape)
    if shape.shape != (4,) or (shape < 1).any():
        raise TopologyError(
            f"Topology: mesh_shape is {np.asarray(mesh_shape).tolist()}.\n\n"
            f"A mesh of TPUs has 4 positive sizes: {', '.join(AXES)}.\n\n"
            "Pass for instance [2, 2, 1, 2] for 2x2 chips of 2 cores."
        )
    # The index has one entry per place of the mesh, and serialized bytes may contain any size.
    if math.prod(shape.tolist()) > _LARGEST:
        raise TopologyError(
            f"Topology: mesh_shape is {shape.tolist()}, of {math.prod(shape.tolist())} cores.\n\n"
            f"A topology has at most {_LARGEST} cores.\n\nPass smaller sizes."
        )
    return shape


def _validate_coordinates(device_coordinates: Any, mesh_shape: np.ndarray) -> np.ndarray:
    coordinates = as_integers("Topology: device_coordinates", device_coordinates)
    if coordinates.ndim != 3:
        raise CoordinateError(
            f"Topology: device_coordinates has shape {list(coordinates.shape)}.\n\n"
            "Its shape is [tasks, devices of a task, 4].\n\n"
            "For one task, wrap the list of its devices: [[[0, 0, 0, 0], ...]]."
        )
    if coordinates.shape[2] != 4:
        raise TopologyError(
            f"Topology: device_coordinates has shape {list(coordinates.shape)}: "
            f"{coordinates.shape[2]} coordinates for a device.\n\nThe mesh has 4 dims.\n\n"
            f"Give 4 coordinates for each device: {', '.join(AXES)}."
        )
    outside = (coordinates < 0) | (coordinates >= mesh_shape)
    if outside.any():
        task, device = (int(i) for i in np.argwhere(outside)[0][:2])
        raise CoordinateError(
            f"Topology: device_coordinates[{task}][{device}] is "
            f"{coordinates[task, device].tolist()}, outside the mesh {mesh_shape.tolist()}.\n\n"
            "Coordinates count from 0.\n\n"
            f"Pass coordinates up to {(mesh_shape - 1).tolist()}."
        )
    return coordinates


def _invert(mesh_shape: np.ndarray, coordinates: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    tasks = np.full(mesh_shape, -1, np.int32)
    ordinals = np.full(mesh_shape, -1, np.int32)
    for task, of_task in enumerate(coordinates.tolist()):
        for ordinal, place in enumerate(map(tuple, of_task)):
            if tasks[place] >= 0:
                raise TopologyError(
                    f"Topology: device_coordinates[{tasks[place]}][{ordinals[place]}] and [{task}]"
                    f"[{ordinal}] are both {list(place)}.\n\n"
                    "There is one core at each place.\n\nCorrect one of the two."
                )
            tasks[place], ordinals[place] = task, ordinal
    return tasks, ordinals


def _parse(serialized: Any) -> tuple[list[int], np.ndarray]:
    if not isinstance(serialized, bytes):
        raise refuse_type(
            f"{show(serialized)}.",
            "A serialized topology is bytes.",
            "Pass what Topology.serialized() returned.",
        )
    fields = _serialized.read(serialized)
    rank = len(_validate_mesh(fields.mesh_shape))
    if fields.num_tasks < 0 or fields.devices_per_task < 0:
        raise TopologyError(
            f"{name_call()} holds {fields.num_tasks} tasks of "
            f"{fields.devices_per_task} devices.\n\nNeither number may be negative.\n\n"
            "Pass what Topology.serialized() returned."
        )
    wanted = fields.num_tasks * fields.devices_per_task * rank
    if len(fields.coordinates) != wanted:
        raise TopologyError(
            f"{name_call()} holds {len(fields.coordinates)} coordinates, and "
            f"{fields.num_tasks} tasks x {fields.devices_per_task} devices x {rank} are "
            f"{wanted}.\n\nEach device has {rank} coordinates.\n\nPass what Topology.serialized() "
            "returned."
        )
    # int64, since the bytes may hold numbers beyond int32, which `as_integers` rejects.
    shape = (fields.num_tasks, fields.devices_per_task, rank)
    return fields.mesh_shape, np.asarray(fields.coordinates, np.int64).reshape(shape)
