"""The chips of TPUs: which replicas they run, and the links between them."""

import dataclasses
import functools
from collections.abc import Iterator

import numpy as np

from jaxdist._reports import Grid, plural

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

    @property
    def links(self) -> tuple[tuple[Place, Place], ...]:
        """The links between neighbours: pairs of chips.

        Links that close a ring are missing: JAX does not report which slices have them.
        """
        return self.grid.links

    @functools.cached_property
    def grid(self) -> Grid:
        """The chips as a report shows them."""
        replicas, logical = np.full(self.shape, -1), np.full(self.shape, -1)
        for place, found in self.replicas.items():
            replicas[place], logical[place] = found
        x, y, z, cores = self.shape
        planes = [f"z = {k}" for k in range(z)]
        grid = Grid(replicas, logical, planes, self.num_slices)
        what = "replica.logical device" if grid.is_split else "replica"
        links = f"{plural(len(grid.links), 'link')} between neighbours"
        chips = f"{plural(self.num_chips, 'chip')} ({x} x {y} x {z})"
        head = (
            f"Topology: {chips} of {plural(cores, 'core')}, {links}",
            f"  {what} of each core; x to the right, y down; without links that close a ring",
        )
        return dataclasses.replace(grid, head=head)

    def lines(self) -> Iterator[str]:
        """Yield the chips as text, with a line for each link in x and y."""
        return self.grid.lines()
