"""The places of replicas, and planes of chips, drawn with replicas in colours and links."""

import collections
import dataclasses
import enum
from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from jaxdist._reports.colours import PALETTE
from jaxdist._reports.grid import Grid
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


# In a picture with more cores than this, the numbers would be too small.
_MOST_NUMBERED = 1024
# The space of a chip with its number, and without it.
CHIP_INCHES, SMALL_CHIP_INCHES = 0.42, 0.16
# The fraction of its space that a chip takes; the rest shows links.
_SIDE = 0.66
_UNUSED = ("#f2f2f2", "0.5")
_MOST_NAMES = 3


def is_numbered(grid: Grid) -> bool:
    """Return whether the numbers of replicas are readable in a picture."""
    return grid.replicas.size <= _MOST_NUMBERED


def draw_plane(axis: Any, grid: Grid, plane: int, joined: Joined = Joined.NEIGHBOURS) -> None:
    """Draw one plane of chips, with its links and its numbers."""
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    x, y, _, cores = grid.replicas.shape
    _draw_links(axis, grid, plane, joined)
    boxes: list[Any] = []
    fills: list[str] = []
    for i in range(x):
        for j in range(y):
            for core, (name, replica) in enumerate(grid.names(i, j, plane)):
                wide = _SIDE / cores
                left = i - _SIDE / 2 + core * wide
                fill, front = _UNUSED if replica < 0 else PALETTE[grid.colours[replica]]
                boxes.append(Rectangle((left, j - _SIDE / 2), wide, _SIDE))
                fills.append(fill)
                if is_numbered(grid):
                    axis.text(
                        left + wide / 2,
                        j,
                        name,
                        ha="center",
                        va="center",
                        fontsize=min(7.0, 0.9 * wide * CHIP_INCHES * 72 / (0.62 * len(name))),
                        color=front,
                        zorder=3,
                    )
    axis.add_collection(
        PatchCollection(boxes, facecolor=fills, edgecolor="0.25", linewidth=0.4, zorder=2)
    )
    axis.set_xlim(-0.6, x - 0.4)
    axis.set_ylim(y - 0.4, -0.6)
    axis.set_aspect("equal")
    axis.set_title(grid.planes[plane], fontsize=8)
    for name, count in (("x", x), ("y", y)):
        axis.set(**{f"{name}ticks": range(0, count, -(-count // 16))})
    axis.tick_params(labelsize=6)
    for spine in axis.spines.values():
        spine.set_visible(False)


def _draw_links(axis: Any, grid: Grid, plane: int, joined: Joined) -> None:
    """Draw the links in a plane, dark inside a replica, and stubs of those to the next plane."""
    from matplotlib.collections import LineCollection
    from matplotlib.patches import Rectangle

    x, y, _, _ = grid.replicas.shape
    if joined is not Joined.NEIGHBOURS:
        # A switch joins all chips, so there are no lines between pairs.
        rows = [(j, 1) for j in range(y)] if joined is Joined.ROWS else [(0, y)]
        for first, count in rows:
            box = Rectangle((-0.45, first - 0.45), x - 0.1, count - 0.1)
            box.set(facecolor="0.88", edgecolor="0.6", linewidth=0.8, zorder=0)
            axis.add_patch(box)
        return
    inside: list[Any] = []
    between: list[Any] = []
    up: list[Any] = []
    for a, b in grid.links:
        if a[2] == plane and b[2] == plane:
            one, other = set(grid.replicas[a].tolist()), set(grid.replicas[b].tolist())
            is_inside = bool((one & other) - {-1})
            (inside if is_inside else between).append([a[:2], b[:2]])
        elif a[2] == plane:
            corner = (a[0] + _SIDE / 2, a[1] - _SIDE / 2)
            up.append([corner, (corner[0] + 0.15, corner[1] - 0.15)])
    for lines, colour, width in ((between, "0.65", 1.0), (inside, "0.1", 2.0), (up, "0.3", 1.2)):
        axis.add_collection(LineCollection(lines, colors=colour, linewidths=width, zorder=1))


def make_legend(grid: Grid, joined: Joined = Joined.NEIGHBOURS) -> tuple[list[Any], list[str]]:
    """Return the handles and labels of a legend: replicas by colour, unused cores, links."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    shown: list[tuple[Any, str]] = [*list_patches(grid.colours)]
    if (grid.replicas < 0).any():
        shown.append((Patch(facecolor=_UNUSED[0], edgecolor="0.25"), f"{grid.chip} not used"))
    if joined is not Joined.NEIGHBOURS:
        patch = Patch(facecolor="0.88", edgecolor="0.6")
        shown.append((patch, "joined by NVLink"))
    elif grid.links:
        shown.append((Line2D([], [], color="0.65", linewidth=1.0), "link between replicas"))
        if grid.is_split:
            shown.append((Line2D([], [], color="0.1", linewidth=2.0), "link inside a replica"))
        if grid.replicas.shape[2] > grid.num_slices:
            tick = Line2D([], [], color="0.3", linestyle="", marker=(2, 0, -45), markersize=6)
            shown.append((tick, "link to the next plane"))
    return [handle for handle, _ in shown], [label for _, label in shown]


def list_patches(colours: Sequence[int]) -> list[tuple[Any, str]]:
    """Return the patch of each colour for a legend, and the names of its replicas."""
    from matplotlib.patches import Patch

    of_colour: dict[int, list[int]] = collections.defaultdict(list)
    for replica, colour in enumerate(colours):
        of_colour[colour].append(replica)
    return [
        (
            Patch(facecolor=PALETTE[colour][0], edgecolor="0.25", linewidth=0.4),
            _name_replicas(replicas),
        )
        for colour, replicas in sorted(of_colour.items())
    ]


def _name_replicas(replicas: list[int]) -> str:
    """Return the names of the replicas of one colour; if there are many, the first ones."""
    if len(replicas) == 1:
        return f"replica {replicas[0]}"
    names = ", ".join(map(str, replicas[:_MOST_NAMES]))
    more = len(replicas) - _MOST_NAMES
    return f"replicas {names}" + (f" and {more:,} more" if more > 0 else "")
