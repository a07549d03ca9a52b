"""The algorithms by the names in specs, and the one that the cost model finds fastest."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from jaxdist import cost
from jaxdist._called import called, refuse
from jaxdist._collectives.algorithms.algorithm import Algorithm, ReplicaGroups, Scattering, TwoLevel
from jaxdist._collectives.algorithms.one_level import HalvingDoubling, Host, OneDevice, Ring, Xla
from jaxdist._mesh import ReplicaMesh

NAMES = (
    "nccl",
    "nccl/xring",
    "nccl/rechd",
    "nccl/pscpu",
    "xring",
    "pscpu",
    "psgpu",
    "pscpu/pscpu",
)


def check_name(name: Any) -> None:
    """Refuse a name that is not one of the eight."""
    if not isinstance(name, str) or name not in NAMES:
        raise refuse(
            f"all_reduce_spec with the algorithm {name!r}, which does not exist.",
            f"The algorithms are {', '.join(map(repr, NAMES))}. Names with a slash have two "
            "levels: within a worker, and across workers.",
            "Pass one of them, for instance 'nccl'.",
        )


def make_algorithm(name: str, *, local: int, platform: str) -> Algorithm:
    """Return the algorithm with a name.

    Args:
        name: One of `NAMES`.
        local: Replicas of each worker, for names with a slash.
        platform: Platform of the devices.

    Raises:
        ArgumentError: `name` is not one of `NAMES`.
    """
    check_name(name)
    within: dict[str, Scattering] = {"nccl": Xla(), "pscpu": Host(platform)}
    alone: dict[str, Algorithm] = {
        **within,
        "xring": Ring(),
        "rechd": HalvingDoubling(),
        "psgpu": OneDevice(),
    }
    inner, slash, outer = name.partition("/")
    return TwoLevel(within[inner], alone[outer], local) if slash else alone[inner]


@dataclasses.dataclass(frozen=True)
class Auto(Algorithm):
    """The fastest algorithm for each vector by its bytes; of equally fast ones, XLA's own."""

    links: "cost.Links"
    local: int
    platform: str

    name = "auto"

    def all_reduce(self, vector: jax.Array, level: ReplicaGroups) -> jax.Array:
        """Return the sum by the algorithm that is fastest for this vector."""
        return self.choose(level.size, vector.nbytes).all_reduce(vector, level)

    @called("auto")
    def choose(self, num_replicas: int, num_bytes: int) -> Algorithm:
        """Return the fastest algorithm."""
        name = self.predict_times(num_replicas, num_bytes)[0][0]
        return make_algorithm(name, local=self.local, platform=self.platform)

    def predict_times(self, num_replicas: int, num_bytes: int) -> list[tuple[str, float]]:
        """Return all possible algorithms with their predicted seconds, the fastest first."""
        return cost.cheapest(num_replicas, num_bytes, self.links, self.local, NAMES)


def make_auto(layout: ReplicaMesh) -> Auto:
    """Return the choice for a mesh, whose workers are its processes or slices."""
    owners = [cost.worker_of(layout.device_grid[r, 0]) for r in range(layout.num_replicas)]
    # Algorithms of two levels need workers of one size. Otherwise all replicas count as one worker.
    local = find_worker_size(owners) or layout.num_replicas
    return Auto(cost.links_of(layout), local, layout.platform)


def find_worker_size(owners: Sequence[int]) -> int:
    """Return how many replicas each of several owners has, if they are equally many; else 0."""
    size = owners.count(owners[0])
    rows = [owners[i : i + size] for i in range(0, len(owners), size)]
    # An owner whose replicas are not neighbours is not a worker; the check of the rows finds that.
    several = size < len(owners)
    even = len(owners) == size * len(set(owners))
    return size if several and even and all(len(set(row)) == 1 for row in rows) else 0
