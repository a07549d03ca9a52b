"""`Grid`: chips in planes, with the links between them and the replicas of their cores."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from rich.text import Text

from jaxdist._reports.colours import PALETTE, choose_colours, list_replicas, style_of
from jaxdist._reports.notebook import as_fixed_width
from jaxdist._reports.tables import Block, as_text
from jaxdist._reports.words import plural

# Columns and rows of a plane that are printed. A terminal has room for about this many, and the
# largest NVLink domain has 18 hosts.
_WIDEST, _TALLEST = 16, 18
# This many chips are printed, but at least two planes.
_MOST_CHIPS, _FEWEST_PLANES = 64, 2
# If the width is unknown, planes are next to each other in this many columns.
_USUAL_WIDTH = 80
_INDENT, _GAP = 4, 3
Place = tuple[int, int, int]


@dataclasses.dataclass(frozen=True, eq=False)
class Grid(Block):
    """Chips in planes.

    Args:
        replicas: The replica at `[x, y, z, core]`; -1 if the core has none.
        logical: The logical device there.
        planes: The name of each plane.
        num_slices: The slices, which are stacked in z. No links connect them.
        has_links: Whether neighbours are linked, as in a slice of TPUs.
        head: The lines before the planes.
        chip: The word for one chip.
    """

    replicas: np.ndarray
    logical: np.ndarray
    planes: Sequence[str]
    num_slices: int = 1
    has_links: bool = True
    head: tuple[str, ...] = ()
    chip: str = "chip"

    @property
    def is_split(self) -> bool:
        """Whether a replica has several logical devices."""
        return bool((self.logical > 0).any())

    @property
    def num_replicas(self) -> int:
        """The number of replicas."""
        return int(self.replicas.max()) + 1

    @functools.cached_property
    def neighbours(self) -> tuple[tuple[Place, Place], ...]:
        """The pairs of neighbouring chips in each slice."""
        x, y, z, _ = self.replicas.shape
        depth = z // self.num_slices
        found: list[tuple[Place, Place]] = []
        for i, j, k in itertools.product(range(x), range(y), range(z)):
            for other in ((i + 1, j, k), (i, j + 1, k), (i, j, k + 1)):
                is_inside = other[0] < x and other[1] < y and other[2] < z
                if is_inside and k // depth == other[2] // depth:
                    found.append(((i, j, k), other))
        return tuple(found)

    @property
    def links(self) -> tuple[tuple[Place, Place], ...]:
        """The links between neighbours.

        Links that close a ring are missing: JAX does not report which slices have them.
        """
        return self.neighbours if self.has_links else ()

    def count_links_up(self, plane: int) -> int:
        """Return the number of links from a plane to the next one."""
        return sum(a[2] == plane and b[2] != plane for a, b in self.links)

    @functools.cached_property
    def colours(self) -> tuple[int, ...]:
        """The index in the palette of each replica; neighbours differ."""
        touching: set[tuple[int, int]] = set()
        for a, b in self.neighbours:
            one, other = self.replicas[a].tolist(), self.replicas[b].tolist()
            touching |= set(itertools.product(one, other))
        for cores in self.replicas.reshape(-1, self.replicas.shape[3]).tolist():
            touching |= set(itertools.pairwise(cores))
        pairs = ((a, b) for a, b in sorted(touching) if a != b and min(a, b) >= 0)
        return choose_colours(self.num_replicas, pairs)

    def names(self, x: int, y: int, z: int) -> list[tuple[str, int]]:
        """Return the name and the replica of each core of a chip; `-` and -1 if it has none."""
        cores = zip(self.replicas[x, y, z].tolist(), self.logical[x, y, z].tolist(), strict=True)
        return [
            ("-" if r < 0 else f"{r}.{part}" if self.is_split else str(r), r) for r, part in cores
        ]

    def cell(self, x: int, y: int, z: int) -> str:
        """Return the replicas of a chip, one for each core; `-` for a core without one."""
        return ",".join(name for name, _ in self.names(x, y, z))

    def texts(self, width: int | None = None) -> Iterator[Text]:
        """Yield the planes, next to each other if they fit; if there are many, the first ones."""
        x, y, z, _ = self.replicas.shape
        yield from map(Text, as_text(self.head, width).split("\n"))
        if self.num_replicas > 0:
            yield Text("  ") + list_replicas(self.colours)
        if self.num_replicas > len(PALETTE):
            note = f"  Where the output has colours, there are {len(PALETTE)}; neighbours differ"
            yield from map(Text, as_text([note], width).split("\n"))
        shown = min(z, max(_FEWEST_PLANES, _MOST_CHIPS // (x * y)))
        panels = [panel for plane in range(shown) for panel in self._panels(plane, width)]
        yield from _join_panels(panels, width or _USUAL_WIDTH)
        if z > shown:
            yield Text(f"  and {plural(z - shown, 'plane')} more of {x} x {y} {self.chip}s")

    def html(self) -> str:
        """Return the planes as HTML, with colours."""
        return as_fixed_width(Text("\n").join(self.texts(_USUAL_WIDTH)))

    def _panels(self, plane: int, width: int | None) -> Iterator[list[Text]]:
        """Yield the lines of a plane; if it is too wide, several panels with some columns each."""
        x, y = min(self.replicas.shape[0], _WIDEST), min(self.replicas.shape[1], _TALLEST)
        # Over all rows, so that the printed rows line up with each other.
        size = max(len(self.cell(i, j, plane)) for i in range(x) for j in range(y))
        room = (width or _USUAL_WIDTH) - _INDENT
        is_wide = self.has_links and x * (size + 4) - 4 <= room
        each = x
        if width is not None and not is_wide:
            most = max(1, min(x, (room + 1) // (size + 1)))
            each = -(-x // -(-x // most))
        up = self.count_links_up(plane)
        for first in range(0, x, each):
            columns = range(first, min(first + each, x))
            title = self.planes[plane]
            if each < x:
                title += f", columns {first} to {columns[-1]}"
            elif up:
                title += f", {plural(up, 'link')} to the next"
            yield [Text(title), *self._rows(plane, columns, y, size, is_wide)]

    def _rows(
        self, plane: int, columns: range, rows: int, size: int, is_wide: bool
    ) -> Iterator[Text]:
        """Yield a line for each row of chips, and lines with the links downward in between."""
        wide, tall, _, _ = self.replicas.shape
        between = " -- " if is_wide else "-" if self.has_links else " "
        more = " ..." if wide > columns[-1] + 1 and columns[-1] + 1 == _WIDEST else ""
        for j in range(rows):
            line = Text("  ")
            for i in columns:
                own = self.names(i, j, plane)
                padding = size - len(self.cell(i, j, plane))
                left = padding // 2 if is_wide else padding
                # Tight links run up to the name.
                line.append(between * (i > columns[0]))
                line.append((" " if is_wide or i == columns[0] else between) * left)
                for number, (name, replica) in enumerate(own):
                    line.append("," * (number > 0))
                    line.append(name, "" if replica < 0 else style_of(self.colours[replica]))
                line.append(" " * (padding - left))
            line.append(more)
            line.rstrip()
            yield line
            if self.has_links and j + 1 < rows:
                bars = ("|".center(size) if is_wide else "|".rjust(size) for _ in columns)
                yield Text("  " + (" " * len(between)).join(bars).rstrip())
        if tall > rows:
            yield Text(f"  and {plural(tall - rows, 'row')} more")


def _join_panels(panels: Sequence[list[Text]], width: int) -> Iterator[Text]:
    """Yield the lines of panels, with as many next to each other as fit."""
    waiting: list[list[Text]] = []
    for panel in [*panels, None]:
        used = sum(map(_width_of, waiting)) + _GAP * len(waiting) + _INDENT - 2
        if waiting and (panel is None or used + _width_of(panel) > width):
            yield from _put_beside(waiting)
            waiting = []
        if panel is not None:
            waiting.append(panel)


def _width_of(panel: Sequence[Text]) -> int:
    return max(len(line) for line in panel)


def _put_beside(panels: Sequence[list[Text]]) -> Iterator[Text]:
    widths = [_width_of(panel) for panel in panels]
    for lines in itertools.zip_longest(*panels, fillvalue=Text()):
        joined = Text("  ")
        for number, (line, size) in enumerate(zip(lines, widths, strict=True)):
            joined.append(" " * _GAP * (number > 0))
            joined.append_text(line)
            joined.append(" " * (size - len(line)))
        joined.rstrip()
        yield joined
