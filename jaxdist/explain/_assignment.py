"""Which replica runs on which chip, as a picture."""

import dataclasses
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxdist.errors import ArgumentError, MissingExtraError
from jaxdist.explain._words import plural
from jaxdist.tpu.experimental import DeviceAssignment

# A plane of chips is printed whole up to this many in a row, and so many planes.
_WIDEST = 16
_MOST_PLANES = 2
# Chips are numbered in a picture up to this many.
_MOST_NUMBERED = 256


@dataclasses.dataclass(frozen=True)
class Picture:
    """An assignment, and how it is drawn.

    Args:
        assignment: Which core is logical device l of replica r.
        num_slices: Slices that lie behind one another in z, with no wire between them.
        title: What stands above.
    """

    assignment: DeviceAssignment
    num_slices: int
    title: str

    @functools.cached_property
    def grids(self) -> tuple[np.ndarray, np.ndarray]:
        """The replica and the logical device at `[x, y, z, core]`; -1 where none runs."""
        shape = tuple(self.assignment.topology.mesh_shape.tolist())
        replicas, logical = np.full(shape, -1), np.full(shape, -1)
        cores = self.assignment.core_assignment
        places = tuple(np.moveaxis(cores, -1, 0))
        replicas[places] = np.arange(cores.shape[0])[:, None]
        logical[places] = np.arange(cores.shape[1])[None, :]
        return replicas, logical

    def lines(self) -> Iterator[str]:
        """Planes of chips as text; of many the first ones, since the others are alike."""
        replicas, _ = self.grids
        x, y, z, cores = replicas.shape
        per_slice = z // self.num_slices
        what = "replica" if self.assignment.num_cores_per_replica == 1 else "replica.logical device"
        more = f", {what} of its {cores} cores" if cores > 1 else f", {what} of each chip"
        yield f"Assignment (x to the right, y down{more})"
        for plane in range(min(z, _MOST_PLANES)):
            slice_number, depth = divmod(plane, per_slice)
            of = f"slice {slice_number}, " if self.num_slices > 1 else ""
            yield f"  {of}z = {depth}"
            yield from self._plane(plane, x, y)
        if z > _MOST_PLANES:
            yield f"  and {plural(z - _MOST_PLANES, 'plane')} more of {x} x {y} chips"

    def _plane(self, plane: int, x: int, y: int) -> Iterator[str]:
        cells = [[self._cell(i, j, plane) for i in range(min(x, _WIDEST))] for j in range(y)]
        width = max(len(cell) for row in cells for cell in row)
        for j, row in enumerate(cells[:_WIDEST]):
            dots = " ..." if x > _WIDEST else ""
            yield "    " + " ".join(cell.rjust(width) for cell in row) + dots
            if j == _WIDEST - 1 and y > _WIDEST:
                yield f"    and {plural(y - _WIDEST, 'row')} more"

    def _cell(self, x: int, y: int, z: int) -> str:
        replicas, logical = self.grids
        names = []
        for r, part in zip(replicas[x, y, z].tolist(), logical[x, y, z].tolist(), strict=True):
            alone = self.assignment.num_cores_per_replica == 1
            names.append("-" if r < 0 else str(r) if alone else f"{r}.{part}")
        return ",".join(names)

    def draw(self, path: str | Path) -> Path:
        """Write a picture: a panel for each plane of chips, coloured by replica.

        Raises:
            MissingExtraError: matplotlib is not installed.
            ArgumentError: A path that no picture can be written to.
        """
        target = picture_path(path)
        replicas, _ = self.grids
        x, y, z, cores = replicas.shape
        columns = min(z, 6)
        rows = -(-z // columns)
        # The cores of a chip stand beside each other.
        flat = replicas.transpose(2, 1, 0, 3).reshape(z, y, x * cores)
        figure = _figure(2.2 * columns + 1, 2.2 * rows * max(0.4, y / x) + 1)
        axes = figure.subplots(rows, columns, squeeze=False)
        for plane, axis in enumerate(axes.flat):
            axis.set_axis_off()
            if plane < z:
                self._panel(axis, flat[plane], plane, z, cores)
        figure.suptitle(self.title, fontsize=9)
        figure.savefig(target)
        return target

    def _panel(self, axis: Any, numbers: np.ndarray, plane: int, z: int, cores: int) -> None:
        count = self.assignment.num_replicas
        shown = np.ma.masked_less(numbers, 0)
        axis.imshow(shown, cmap="viridis", vmin=0, vmax=max(1, count - 1), aspect="auto")
        per_slice = z // self.num_slices
        of = f"slice {plane // per_slice}, " if self.num_slices > 1 else ""
        axis.set_title(f"{of}z = {plane % per_slice}", fontsize=7)
        if numbers.size * z > _MOST_NUMBERED:
            return
        for (j, i), replica in np.ndenumerate(numbers):
            colour = "white" if replica < count / 2 else "black"
            name = self._cell(i // cores, j, plane).split(",")[i % cores]
            axis.text(i, j, name, ha="center", va="center", fontsize=6, color=colour)


def picture_path(path: str | Path) -> Path:
    """The path of a picture that can be written, before minutes are spent on what it shows.

    Raises:
        MissingExtraError: matplotlib is not installed.
        ArgumentError: No such folder, one that is not writable, a folder in the place of a file, or
            a suffix of which matplotlib makes no picture.
    """
    formats = _figure(1, 1).canvas.get_supported_filetypes()
    target = Path(path)
    folder = target.absolute().parent
    wanted = f"A picture was to be written to {str(path)!r}"
    if not folder.is_dir():
        raise ArgumentError(
            f"{wanted}, and there is no folder {str(folder)!r}.\n\n"
            "A picture is written to a folder that exists.\n\nMake the folder first."
        )
    if target.is_dir():
        raise ArgumentError(
            f"{wanted}, which is a folder.\n\nA picture is a file.\n\nName a file in it: "
            f"{str(target / 'plan.png')!r}."
        )
    if target.suffix.lower().removeprefix(".") not in formats:
        raise ArgumentError(
            f"{wanted}, and its suffix {target.suffix!r} names no format of pictures.\n\n"
            f"The formats are {', '.join(sorted(formats))}.\n\n"
            f"Use {str(target.with_suffix('.png'))!r}."
        )
    if not os.access(target if target.exists() else folder, os.W_OK):
        raise ArgumentError(
            f"{wanted}, where this user may not write.\n\n"
            "A picture is written to a folder with write permission.\n\n"
            "Name a file in another folder."
        )
    return target


def _figure(width: float, height: float) -> Any:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError(
            "matplotlib is needed to draw an assignment, and it is not installed.\n\n"
            "jaxdist is installed without its optional packages.\n\n"
            "Install it with: pip install matplotlib"
        ) from None
    figure = Figure(figsize=(width, height), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    return figure
