"""The algorithms by the names in specs."""

from typing import Any

from jaxdist._called import refuse
from jaxdist._collectives.algorithms.algorithm import Algorithm, Scattering
from jaxdist._collectives.algorithms.halving_doubling import HalvingDoubling
from jaxdist._collectives.algorithms.host import Host
from jaxdist._collectives.algorithms.one_device import OneDevice
from jaxdist._collectives.algorithms.ring import Ring
from jaxdist._collectives.algorithms.two_level import TwoLevel
from jaxdist._collectives.algorithms.xla import Xla

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
