"""Finds the replicas of devices, and their colours."""

import dataclasses
from collections.abc import Iterable, Mapping

import jax

from jaxdist._mesh import ReplicaMesh


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
