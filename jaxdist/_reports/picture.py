"""A picture of an assignment: which replica runs on which chip."""

import dataclasses
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxdist._reports.places import Places
from jaxdist._reports.words import plural
from jaxdist._validate import as_local_path
from jaxdist.errors import ArgumentError, MissingExtraError

# Rows and columns of a plane that are printed, and planes that are printed. A terminal has room for
# about that many.
_WIDEST = 16
_MOST_PLANES = 2
# In a picture with more chips than this, the numbers would overlap.
_MOST_NUMBERED = 256


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
    def grids(self) -> tuple[np.ndarray, np.ndarray]:
        """The replica and the logical device at `[x, y, z, core]`; -1 if the core has none."""
        shape = self.assignment.shape
        replicas, logical = np.full(shape, -1), np.full(shape, -1)
        cores = self.assignment.coordinates
        places = tuple(np.moveaxis(cores, -1, 0))
        replicas[places] = np.arange(cores.shape[0])[:, None]
        logical[places] = np.arange(cores.shape[1])[None, :]
        return replicas, logical

    def lines(self) -> Iterator[str]:
        """Yield planes of chips as text. Of many planes, only the first ones."""
        replicas, _ = self.grids
        x, y, z, cores = replicas.shape
        of = f"its {cores} cores" if cores > 1 else f"each {self.assignment.chip}"
        right, down = (name.split()[0] for name in self.assignment.axes)
        yield f"Assignment ({right} to the right, {down} down, {self._what} of {of})"
        # The other planes look alike, and a pod has up to 24.
        for plane in range(min(z, _MOST_PLANES)):
            yield f"  {self.assignment.planes[plane]}"
            yield from self._plane(plane, x, y)
        if z > _MOST_PLANES:
            chips = f"{self.assignment.chip}s"
            yield f"  and {plural(z - _MOST_PLANES, 'plane')} more of {x} x {y} {chips}"

    def _plane(self, plane: int, x: int, y: int) -> Iterator[str]:
        """Yield the rows of one plane of chips."""
        cells = [[self._cell(i, j, plane) for i in range(min(x, _WIDEST))] for j in range(y)]
        # Over all rows, so that also the rows that are printed line up with each other.
        width = max(len(cell) for row in cells for cell in row)
        for j, row in enumerate(cells[:_WIDEST]):
            dots = " ..." if x > _WIDEST else ""
            yield "    " + " ".join(cell.rjust(width) for cell in row) + dots
            if j == _WIDEST - 1 and y > _WIDEST:
                yield f"    and {plural(y - _WIDEST, 'row')} more"

    def _cell(self, x: int, y: int, z: int) -> str:
        """Return the names of the replicas on one chip, one for each core."""
        replicas, logical = self.grids
        names = []
        for r, part in zip(replicas[x, y, z].tolist(), logical[x, y, z].tolist(), strict=True):
            alone = self.assignment.num_logical == 1
            names.append("-" if r < 0 else str(r) if alone else f"{r}.{part}")
        return ",".join(names)

    def draw(self, path: str | Path) -> Path:
        """Write a picture with a panel for each plane of chips, coloured by replica.

        Raises:
            MissingExtraError: matplotlib is not installed.
            ArgumentError: No picture can be written to the path.
        """
        target = picture_path(path)
        replicas, _ = self.grids
        x, y, z, cores = replicas.shape
        columns = min(z, 6)
        rows = -(-z // columns)
        # An image has two dims, so the cores of a chip are neighbours in x.
        flat = replicas.transpose(2, 1, 0, 3).reshape(z, y, x * cores)
        figure = make_figure(2.2 * columns + 1, 2.2 * rows * max(0.4, y / x) + 1)
        axes = figure.subplots(rows, columns, squeeze=False)
        for plane, axis in enumerate(axes.flat):
            if plane < z:
                self._panel(axis, flat[plane], plane, cores)
                self._label(axis, plane % columns == 0, plane + columns >= z)
            else:
                axis.set_axis_off()
        meaning = "colour: replica" + (f", number: {self._what}" if self._is_numbered else "")
        figure.suptitle(f"{self.title}\n{meaning}", fontsize=9)
        # The layout gives panels room, and a title may be wider than all of them.
        figure.savefig(target, bbox_inches="tight")
        return target

    @property
    def _what(self) -> str:
        """The words for the name of a core."""
        alone = self.assignment.num_logical == 1
        return "replica" if alone else "replica.logical device"

    @property
    def _is_numbered(self) -> bool:
        return self.grids[0].size <= _MOST_NUMBERED

    def _label(self, axis: Any, is_left: bool, is_bottom: bool) -> None:
        """Name the dims, beside the outer panels only, and count the chips."""
        x, y, _, cores = self.grids[0].shape
        across, down = self.assignment.axes
        for name, words, count, width, is_outer in (
            ("x", across, x, cores, is_bottom),
            ("y", down, y, 1, is_left),
        ):
            chips = range(0, count, -(-count // 8))
            # The cores of a chip are neighbours in x.
            places = [chip * width + (width - 1) / 2 for chip in chips]
            axis.set(**{f"{name}ticks": places, f"{name}ticklabels": chips})
            if is_outer:
                axis.set(**{f"{name}label": words})
        axis.tick_params(labelsize=6)

    def _panel(self, axis: Any, numbers: np.ndarray, plane: int, cores: int) -> None:
        """Draw one plane of chips."""
        count = self.assignment.num_replicas
        shown = np.ma.masked_less(numbers, 0)
        # One range of colours for all planes, so that a colour means the same replica everywhere.
        # `vmax` may not be 0 with one replica.
        axis.imshow(shown, cmap="viridis", vmin=0, vmax=max(1, count - 1), aspect="auto")
        axis.set_title(self.assignment.planes[plane], fontsize=7)
        if not self._is_numbered:
            return
        for (j, i), replica in np.ndenumerate(numbers):
            # The colours of low replica numbers are dark.
            colour = "white" if replica < count / 2 else "black"
            name = self._cell(i // cores, j, plane).split(",")[i % cores]
            axis.text(i, j, name, ha="center", va="center", fontsize=6, color=colour)


def picture_path(path: str | Path) -> Path:
    """Return the path of a picture after checking that it can be written.

    The caller checks this before it computes for minutes what the picture shows.

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


def make_figure(width: float, height: float) -> Any:
    """Return an empty figure of matplotlib."""
    # Imported here, because matplotlib is an optional package. The Agg canvas needs no display, and
    # leaves the user's pyplot backend alone.
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError(
            "matplotlib is needed to draw a picture, and it is not installed.\n\n"
            "jaxdist is installed without its optional packages.\n\n"
            "Install it with: pip install matplotlib"
        ) from None
    figure = Figure(figsize=(width, height), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    return figure
