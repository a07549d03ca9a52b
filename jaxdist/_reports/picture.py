"""Draws an assignment: which replica runs on which chip."""

import dataclasses
import functools
import os
from pathlib import Path
from typing import Any

import numpy as np

from jaxdist._reports.grid import Grid
from jaxdist._reports.grid_picture import (
    CHIP_INCHES,
    SMALL_CHIP_INCHES,
    Joined,
    Places,
    draw_plane,
    is_numbered,
    make_legend,
)
from jaxdist._validate import as_local_path, require_extra
from jaxdist.errors import ArgumentError

_MOST_COLUMNS = 6
# A wider picture would be shrunk where it is shown.
_WIDEST_INCHES = 16.0


@dataclasses.dataclass(frozen=True)
class Picture:
    """An assignment, and how to draw it.

    Args:
        assignment: The place of each logical device l of each replica r.
        title: The title of the picture.
    """

    assignment: Places
    title: str

    @functools.cached_property
    def grid(self) -> Grid:
        """The chips as a report shows them, with the replica of each core."""
        places, cores = self.assignment, self.assignment.shape[3]
        replicas, logical = np.full(places.shape, -1), np.full(places.shape, -1)
        at = tuple(np.moveaxis(places.coordinates, -1, 0))
        replicas[at] = np.arange(places.num_replicas)[:, None]
        logical[at] = np.arange(places.num_logical)[None, :]
        of = f"its {cores} cores" if cores > 1 else f"each {places.chip}"
        right, down = (name.split()[0] for name in places.axes)
        joined = {
            Joined.NEIGHBOURS: "Lines are links of neighbours, without those that close a ring",
            Joined.ROWS: f"NVLink joins the {places.chip}s of a row",
            Joined.PLANES: f"NVLink joins all {places.chip}s of a domain",
        }
        head = (
            f"Assignment ({right} to the right, {down} down, {self._what} of {of})",
            f"  {joined[places.joined]}",
        )
        has_links = places.joined is Joined.NEIGHBOURS
        return Grid(
            replicas, logical, places.planes, places.num_slices, has_links, head, places.chip
        )

    def draw(self, path: str | Path) -> Path:
        """Write a picture with a panel for each plane of chips, coloured by replica.

        Raises:
            MissingExtraError: matplotlib is not installed.
            ArgumentError: A picture cannot be written to the path.
        """
        target = picture_path(path)
        x, y, z, _ = self.assignment.shape
        inches = CHIP_INCHES if is_numbered(self.grid) else SMALL_CHIP_INCHES
        wide, tall = max(1.6, inches * x + 0.6), max(1.2, inches * y + 0.7)
        columns = max(1, min(z, _MOST_COLUMNS, int(_WIDEST_INCHES / wide)))
        # Rows of equal length: 8 planes are 4 and 4.
        rows = -(-z // columns)
        columns = -(-z // rows)
        figure = make_figure(wide * columns + 2.2, max(tall * rows + 0.9, 3.0))
        axes = figure.subplots(rows, columns, squeeze=False)
        for plane, axis in enumerate(axes.flat):
            if plane >= z:
                axis.set_axis_off()
                continue
            draw_plane(axis, self.grid, plane, self.assignment.joined)
            across, down = self.assignment.axes
            if plane + columns >= z:
                axis.set_xlabel(across, fontsize=7)
            if plane % columns == 0:
                axis.set_ylabel(down, fontsize=7)
        meaning = f"number: {self._what}" if is_numbered(self.grid) else "colour: replica"
        figure.suptitle(f"{self.title}\n{meaning}", fontsize=9)
        # Not at the top, where a long title may be.
        figure.legend(
            *make_legend(self.grid, self.assignment.joined), loc="outside right center", fontsize=7
        )
        # The layout makes room for panels, and a title may be wider than all of them.
        figure.savefig(target, bbox_inches="tight")
        return target

    @property
    def _what(self) -> str:
        """The words for the name of a core."""
        alone = self.assignment.num_logical == 1
        return "replica" if alone else "replica.logical device"


def picture_path(path: str | Path) -> Path:
    """Return the path of a picture after checking that it can be written.

    Callers check this before they compute the contents of the picture for minutes.

    Raises:
        MissingExtraError: matplotlib is not installed.
        ArgumentError: The folder does not exist or is not writable, the path is a folder, or
            matplotlib does not know the suffix.
    """
    formats = make_figure(1, 1).canvas.get_supported_filetypes()
    wanted = f"A picture was to be written to {str(path)!r}"
    target = Path(as_local_path(wanted, str(path)))
    folder = target.absolute().parent
    if not folder.is_dir():
        raise ArgumentError(
            f"{wanted}, and the folder {str(folder)!r} does not exist.\n\n"
            "A picture is written to a folder that exists.\n\nMake the folder first."
        )
    if target.is_dir():
        raise ArgumentError(
            f"{wanted}, which is a folder.\n\nA picture is a file.\n\nName a file in it: "
            f"{str(target / 'plan.png')!r}."
        )
    if target.suffix.lower().removeprefix(".") not in formats:
        raise ArgumentError(
            f"{wanted}, and its suffix {target.suffix!r} is not that of a picture.\n\n"
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


def make_figure(width: float, height: float) -> Any:
    """Return an empty figure of matplotlib."""
    # Imported here, because matplotlib is an optional package. The Agg canvas needs no display, and
    # leaves the user's pyplot backend alone.
    require_extra("matplotlib", "draw a picture")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    return figure
