"""Divides the replicas of a slice among mesh axes; `Target` is the machine of a plan."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Self

import numpy as np
from jax.sharding import AxisType, Mesh

from jaxdist._called import called, refuse
from jaxdist._mesh import ReplicaMesh
from jaxdist._reports import Places
from jaxdist._strategies import Strategy
from jaxdist.cost import Chip
from jaxdist.tpu import is_reordered, order_cores
from jaxdist.tpu.experimental import DeviceAssignment, Topology


@dataclasses.dataclass(frozen=True)
class Axes:
    """The axes of a mesh, for the devices of a slice.

    With several slices and several replica axes, the first axis has one position for each slice.
    With one slice it keeps its size. The axes between the first and the last keep their sizes, and
    the last has all remaining replicas.

    Args:
        names: All axes, in the order of the mesh.
        replica: The replica axes, the slowest first.
        sizes: The size of each axis in the mesh that they come from.
    """

    names: tuple[str, ...]
    replica: tuple[str, ...]
    sizes: dict[str, int]

    @classmethod
    def from_layout(cls, layout: ReplicaMesh) -> Self:
        """Return the axes of a layout."""
        return cls(layout.mesh.axis_names, layout.replica_axes, dict(layout.mesh.shape))

    @property
    def single_device(self) -> Self:
        """The same axes, each of size 1."""
        return dataclasses.replace(self, sizes=dict.fromkeys(self.names, 1))

    def apply(self, layout: ReplicaMesh, num_slices: int) -> ReplicaMesh:
        """Return the layout with the same devices, in the same order of replicas, on these axes.

        Raises:
            ArgumentError: The replicas or the logical devices cannot be divided among these axes.
        """
        logical = tuple(name for name in self.names if name not in self.replica)
        names = self.names
        if not logical:
            logical = layout.logical_axes
            names += logical
        sizes = self._size_replica_axes(layout.num_replicas, num_slices)
        sizes += self._size_logical_axes(logical, layout.num_logical)
        # The device grid has the replicas first; the mesh may have its axes in another order.
        order = self.replica + logical
        grid = layout.device_grid.reshape(sizes).transpose([order.index(name) for name in names])
        mesh = Mesh(grid, names, axis_types=(AxisType.Auto,) * len(names))
        return ReplicaMesh(mesh, self.replica, described=layout.described, process=layout.process)

    @called("compile_for")
    def _size_replica_axes(self, count: int, num_slices: int) -> tuple[int, ...]:
        if len(self.replica) == 1:
            return (count,)
        first, *between = (self.sizes[name] for name in self.replica[:-1])
        kept = (num_slices if num_slices > 1 else first, *between)
        if count % math.prod(kept):
            held = ", ".join(
                f"{size} for {name!r}" for name, size in zip(self.replica, kept, strict=False)
            )
            raise refuse(
                f"a topology with {count:,} replicas for a strategy whose replicas are along the "
                f"axes {self.replica}.",
                f"With {held}, the number of replicas must be a multiple of {math.prod(kept):,}.",
                f"Use a slice, or logical devices, with a multiple of {math.prod(kept):,} "
                "replicas.",
            )
        return (*kept, count // math.prod(kept))

    @called("compile_for")
    def _size_logical_axes(self, names: tuple[str, ...], count: int) -> tuple[int, ...]:
        # A single axis can have any size. Several axes do not say how to divide the devices.
        if len(names) == 1:
            return (count,)
        sizes = tuple(self.sizes[name] for name in names)
        if math.prod(sizes) != count:
            held = ", ".join(f"{name!r} of {self.sizes[name]}" for name in names)
            raise refuse(
                f"logical with {count} logical devices, and the strategy splits values over the "
                f"axes {held}.",
                f"Several axes keep their sizes, {math.prod(sizes)} logical devices.",
                f"Leave logical out, or pass a shape of {math.prod(sizes)}.",
            )
        return sizes


# The axes for rules that shard state within a slice, and replicate it over slices: one axis over
# the slices, one within each slice.
_SLICE_AXES = ("slice", "replica")
# The axis of the devices that share the parameters of a replica, where it has other axes too.
LOGICAL = "logical"
SLICES = Axes(_SLICE_AXES, _SLICE_AXES, dict.fromkeys(_SLICE_AXES, 1))


def make_axes(*, in_slices: bool, inner: Mapping[str, int], logical: int) -> Axes | None:
    """Return the axes of a job's mesh; None for one axis of replicas and one of logical devices.

    Args:
        in_slices: Whether the replicas have the axes `("slice", "replica")`.
        inner: The sizes of axes within a replica, such as those of stages, the slowest first.
        logical: The devices of each part that these axes make, along the axis `"logical"`.
    """
    if not inner:
        return SLICES if in_slices else None
    replica = _SLICE_AXES if in_slices else _SLICE_AXES[1:]
    inner = {**inner} | ({LOGICAL: logical} if logical > 1 else {})
    return Axes((*replica, *inner), replica, {**dict.fromkeys(replica, 1), **inner})


def put_on_axes(strategy: Strategy, axes: Axes | None, num_slices: int) -> Strategy:
    """Return a strategy like `strategy` whose mesh has these axes.

    With several slices, the replicas must already be in the order of their slices.

    Raises:
        ArgumentError: The number of replicas is not a multiple of the number of slices.
    """
    return strategy if axes is None else strategy._on(axes.apply(strategy.layout, num_slices))


def assign_slices(topology: Topology, box: Sequence[int], num_slices: int) -> DeviceAssignment:
    """Return an assignment of all cores to replicas, those of the first slice first.

    The replicas of each slice follow a ring within it. Replicas with one core each have another
    order on some slices; see Note [Order of chips].

    Args:
        topology: The cores. All slices are in one topology, one after the other in z.
        box: The shape of one replica, within a slice.
        num_slices: The number of slices.
    """
    x, y, z, cores = topology.mesh_shape.tolist()
    depth, size = z // num_slices, math.prod(box)
    shape, count = list(box), x * y * z * cores // size
    if size == 1 and is_reordered(topology, num_slices):
        return DeviceAssignment(topology, order_cores(topology, num_slices)[:, None])
    if num_slices == 1 or len(topology.missing_devices):
        # With missing devices, the slices differ. So assign the replicas over all slices together,
        # and then sort them by slice.
        made = DeviceAssignment.build(topology, shape, num_replicas=count)
        order = np.argsort(made.core_assignment[:, 0, 2] // depth, kind="stable")
        return DeviceAssignment(topology, made.core_assignment[order])
    # One ring over all slices would cross between slices, over the slow network. So build the
    # ring of the first slice and copy it to the others.
    of_tasks = topology.device_coordinates
    of_first = of_tasks[(of_tasks[:, :, 2] < depth).all(1)]
    first = Topology(mesh_shape=[x, y, depth, cores], device_coordinates=of_first)
    one = DeviceAssignment.build(first, shape, num_replicas=count // num_slices).core_assignment
    offsets = np.arange(num_slices)[:, None, None, None] * np.array([0, 0, depth, 0])
    return DeviceAssignment(topology, (one + offsets).reshape(count, size, 4))


@dataclasses.dataclass(frozen=True)
class Target:
    """The machine of a plan, with a strategy that can only compile, and its chips.

    `num_slices` is the number of slices, or of NVLink domains.
    """

    name: str
    strategy: Strategy
    places: Places
    chip: Chip
    devices_per_chip: int
    num_slices: int

    @property
    def device(self) -> Chip:
        """The resources of one device, its share of a chip."""
        return self.chip.per_device(self.devices_per_chip)
