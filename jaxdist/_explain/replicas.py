"""Finds the replicas of devices, their colours, and the chips and links that they use."""

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping

import jax
import numpy as np

from jaxdist._mesh import ReplicaMesh
from jaxdist._reports import Grid, plural


@dataclasses.dataclass(frozen=True)
class Replicas:
    """The replicas of each device; empty if no strategy is known.

    Args:
        of: The replicas of each device. Virtual ones share devices.
        colours: The index in the palette of each replica.
    """

    of: Mapping[jax.Device, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    colours: tuple[int, ...] = ()

    def find(self, devices: Iterable[jax.Device]) -> list[int]:
        """Return the replicas of devices, in order."""
        return sorted({replica for device in devices for replica in self.of.get(device, ())})

    def find_colour(self, replicas: list[int]) -> int:
        """Return the index in the palette; -1 for several replicas, or for none."""
        return self.colours[replicas[0]] if len(replicas) == 1 else -1


def list_replicas(layout: ReplicaMesh, colours: tuple[int, ...]) -> Replicas:
    """Return the replicas of the devices of a mesh."""
    found: dict[jax.Device, tuple[int, ...]] = {}
    for replica, devices in enumerate(layout.device_grid.tolist()):
        for device in devices:
            found[device] = (*found.get(device, ()), replica)
    return Replicas(found, colours)


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
