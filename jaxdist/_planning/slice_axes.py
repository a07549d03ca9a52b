"""How the replicas of a slice are shared between the axes of a mesh."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Self

import numpy as np
from jax.sharding import AxisType, Mesh

from jaxdist._mesh import ReplicaMesh
from jaxdist._strategies import Strategy
from jaxdist.errors import ArgumentError
from jaxdist.tpu.experimental import DeviceAssignment, Topology


@dataclasses.dataclass(frozen=True)
class Axes:
    """Axes of a mesh, to be laid over a slice.

    Of several replica axes the first goes across slices, where there are several; on one slice it
    keeps its size, as the axes between the first and the last do. The last takes what is left.

    Args:
        names: All axes, in the order of the mesh.
        replica: Those of the replicas, the slowest first.
        sizes: How many positions each has where it is from.
    """

    names: tuple[str, ...]
    replica: tuple[str, ...]
    sizes: dict[str, int]

    @classmethod
    def from_layout(cls, layout: ReplicaMesh) -> Self:
        """The axes of a strategy."""
        return cls(layout.mesh.axis_names, layout.replica_axes, dict(layout.mesh.shape))

    @classmethod
    def for_slices(cls, outer: str, inner: str) -> Self:
        """Replicas over slices, and within each of them."""
        return cls((outer, inner), (outer, inner), {outer: 1, inner: 1})

    @property
    def single_device(self) -> Self:
        """The same axes for one device."""
        return dataclasses.replace(self, sizes=dict.fromkeys(self.names, 1))

    def apply(self, layout: ReplicaMesh, num_slices: int) -> ReplicaMesh:
        """The devices of a layout, replica by replica, under these axes.

        Raises:
            ArgumentError: The slices or the logical devices cannot be shared so.
        """
        logical = tuple(name for name in self.names if name not in self.replica)
        names = self.names
        if not logical:
            logical = layout.logical_axes
            names += logical
        sizes = self._size_replica_axes(layout.num_replicas, num_slices)
        sizes += self._size_logical_axes(logical, layout.num_logical)
        order = self.replica + logical
        grid = layout.device_grid.reshape(sizes).transpose([order.index(name) for name in names])
        mesh = Mesh(grid, names, axis_types=(AxisType.Auto,) * len(names))
        return ReplicaMesh(mesh, self.replica, described=layout.described)

    def _size_replica_axes(self, count: int, num_slices: int) -> tuple[int, ...]:
        if len(self.replica) == 1:
            return (count,)
        first, *between = (self.sizes[name] for name in self.replica[:-1])
        kept = (num_slices if num_slices > 1 else first, *between)
        if count % math.prod(kept):
            held = ", ".join(
                f"{size} for {name!r}" for name, size in zip(self.replica, kept, strict=False)
            )
            raise ArgumentError(
                f"compile_for was given a topology with {count:,} replicas for a strategy whose "
                f"replicas are along the axes {self.replica}.\n\n"
                f"With {held}, the number of replicas must be a multiple of "
                f"{math.prod(kept):,}.\n\nUse a slice, or logical devices, with a multiple of "
                f"{math.prod(kept):,} replicas."
            )
        return (*kept, count // math.prod(kept))

    def _size_logical_axes(self, names: tuple[str, ...], count: int) -> tuple[int, ...]:
        if len(names) == 1:
            return (count,)
        sizes = tuple(self.sizes[name] for name in names)
        if math.prod(sizes) != count:
            held = ", ".join(f"{name!r} of {self.sizes[name]}" for name in names)
            raise ArgumentError(
                f"compile_for was given logical with {count} logical devices, and the strategy "
                f"splits values over the axes {held}.\n\n"
                f"Several axes keep their sizes, {math.prod(sizes)} logical devices.\n\n"
                f"Leave logical out, or pass a shape of {math.prod(sizes)}."
            )
        return sizes


# The axes of rules that lay state over the replicas of a slice.
SLICES = Axes.for_slices("slice", "replica")


def add_slice_axis(strategy: Strategy, num_slices: int) -> Strategy:
    """Return a strategy like one whose replicas are in the order of slices, with an axis for them.

    Raises:
        ArgumentError: The replicas do not divide by the slices.
    """
    return strategy._on(SLICES.apply(strategy.layout, num_slices))


def assign_slices(topology: Topology, box: Sequence[int], num_slices: int) -> DeviceAssignment:
    """As many replicas as fit, those of the first slice first, in each along a ring of its own.

    Args:
        topology: The cores; further slices lie behind the first one in z.
        box: What one replica spans, within a slice.
        num_slices: How many slices.
    """
    x, y, z, cores = topology.mesh_shape.tolist()
    depth, size = z // num_slices, math.prod(box)
    shape, count = list(box), x * y * z * cores // size
    if num_slices == 1 or len(topology.missing_devices):
        made = DeviceAssignment.build(topology, shape, num_replicas=count)
        order = np.argsort(made.core_assignment[:, 0, 2] // depth, kind="stable")
        return DeviceAssignment(topology, made.core_assignment[order])
    of_tasks = topology.device_coordinates
    of_first = of_tasks[(of_tasks[:, :, 2] < depth).all(1)]
    first = Topology(mesh_shape=[x, y, depth, cores], device_coordinates=of_first)
    one = DeviceAssignment.build(first, shape, num_replicas=count // num_slices).core_assignment
    offsets = np.arange(num_slices)[:, None, None, None] * np.array([0, 0, depth, 0])
    return DeviceAssignment(topology, (one + offsets).reshape(count, size, 4))
