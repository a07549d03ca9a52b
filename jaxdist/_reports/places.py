"""`Places`: the place of each logical device of each replica, on any machine."""

import dataclasses
import enum
from collections.abc import Sequence
from typing import Self

import numpy as np

from jaxdist.tpu.experimental import DeviceAssignment


class Joined(enum.Enum):
    """Which chips have links between them."""

    NEIGHBOURS = "neighbours"
    ROWS = "rows"
    PLANES = "planes"


@dataclasses.dataclass(frozen=True, eq=False)
class Places:
    """The places of all logical devices in planes of chips.

    Args:
        coordinates: `[replicas, logical devices, 4]`: column, row, plane, and device of the chip.
        shape: The columns, rows, planes, and devices of a chip.
        planes: The name of each plane.
        chip: The word for one chip.
        axes: The names of columns and rows.
        num_slices: The slices of TPUs, which are stacked in the planes.
        joined: Which chips have links: neighbours, as in a slice of TPUs; or all in a row or plane.
    """

    coordinates: np.ndarray
    shape: tuple[int, ...]
    planes: Sequence[str]
    chip: str
    axes: tuple[str, str]
    num_slices: int = 1
    joined: Joined = Joined.NEIGHBOURS

    @classmethod
    def from_assignment(cls, assignment: DeviceAssignment, num_slices: int) -> Self:
        """Return the places of an assignment of TPUs, whose slices are stacked in z."""
        shape = tuple(assignment.topology.mesh_shape.tolist())
        depth = shape[2] // num_slices
        planes = [
            f"slice {z // depth}, z = {z % depth}" if num_slices > 1 else f"z = {z}"
            for z in range(shape[2])
        ]
        axes = ("x of the chip", "y of the chip")
        return cls(assignment.core_assignment, shape, planes, "chip", axes, num_slices)

    @property
    def num_replicas(self) -> int:
        """The number of replicas."""
        return int(self.coordinates.shape[0])

    @property
    def num_logical(self) -> int:
        """The number of logical devices of a replica."""
        return int(self.coordinates.shape[1])

    @property
    def num_chips(self) -> int:
        """The number of chips of all planes."""
        columns, rows, planes, _ = self.shape
        return columns * rows * planes
