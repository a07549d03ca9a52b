"""The chips of TPUs: which replicas they run, and the links between them."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator

import numpy as np

from jaxdist._reports import plural

# A terminal shows about so many chips side by side, and planes.
_WIDEST = 8
_MOST_PLANES = 2
Place = tuple[int, int, int]


@dataclasses.dataclass(frozen=True)
class Chips:
    """Chips at x, y, z with their cores, and the replica of each core.

    Args:
        shape: Chips in x, y and z, and cores of a chip.
        replicas: The replica and the logical device of each core that the strategy uses.
        num_slices: The number of slices. They are stacked in z, and no links connect them.
    """

    shape: tuple[int, int, int, int]
    replicas: dict[tuple[int, int, int, int], tuple[int, int]]
    num_slices: int = 1

    @property
    def num_chips(self) -> int:
        """The number of chips."""
        x, y, z, _ = self.shape
        return x * y * z

    @functools.cached_property
    def links(self) -> tuple[tuple[Place, Place], ...]:
        """The links between neighbours: pairs of chips.

        Links that close a ring are not among them: JAX does not report which slices have them.
        """
        x, y, z, _ = self.shape
        depth = z // self.num_slices
        found = []
        for chip in itertools.product(range(x), range(y), range(z)):
            for axis in range(3):
                other = list(chip)
                other[axis] += 1
                is_same_slice = chip[2] // depth == other[2] // depth
                if other[axis] < self.shape[axis] and is_same_slice:
                    found.append((chip, (other[0], other[1], other[2])))
        return tuple(found)

    def cell(self, x: int, y: int, z: int) -> str:
        """Return the replicas of a chip, one for each core; `-` for a core that is not used."""
        split = len({part for _, part in self.replicas.values()}) > 1
        words = []
        for core in range(self.shape[3]):
            found = self.replicas.get((x, y, z, core))
            name = "-" if found is None else f"{found[0]}.{found[1]}" if split else str(found[0])
            words.append(name)
        return ",".join(words)

    def lines(self) -> Iterator[str]:
        """Yield the chips as text, with a line for each link in x and y."""
        x, y, z, cores = self.shape
        what = "replica.logical device" if self._is_split else "replica"
        yield (
            f"Topology: {plural(self.num_chips, 'chip')} ({x} x {y} x {z}) of "
            f"{plural(cores, 'core')}, {plural(len(self.links), 'link')} between neighbours"
        )
        yield f"  {what} of each core; x to the right, y down; without links that close a ring"
        for plane in range(min(z, _MOST_PLANES)):
            yield f"  z = {plane}"
            yield from self._plane(plane)
        if z > _MOST_PLANES:
            yield f"  and {plural(z - _MOST_PLANES, 'plane')} more"

    @property
    def _is_split(self) -> bool:
        return any(part for _, part in self.replicas.values())

    def _plane(self, z: int) -> Iterator[str]:
        x, y = min(self.shape[0], _WIDEST), min(self.shape[1], _WIDEST)
        cells = np.array([[self.cell(i, j, z) for i in range(x)] for j in range(y)])
        width = max(len(cell) for cell in cells.ravel())
        more = " ..." if self.shape[0] > _WIDEST else ""
        for j in range(y):
            yield "    " + " -- ".join(cell.center(width) for cell in cells[j]).rstrip() + more
            if j + 1 < y:
                yield "    " + "    ".join("|".center(width) for _ in range(x)).rstrip()
        if self.shape[1] > _WIDEST:
            yield f"    and {plural(self.shape[1] - _WIDEST, 'row')} more"
