"""Makes strategies on GPUs that JAX's CUDA plugin only describes."""

from typing import Any

import numpy as np

from jaxdist import _gpus
from jaxdist import _mesh as meshes
from jaxdist._called import called, refuse, refuse_type
from jaxdist._gpus import GpuCluster, cluster_of
from jaxdist._planning.needs import read_memory_fraction
from jaxdist._planning.slice_axes import Target
from jaxdist._reports import Joined, Places
from jaxdist._strategies import MirroredStrategy
from jaxdist.errors import TopologyError

_MOST_HOSTS_OF_PLANE = 16


@called("compile_for")
def describe(topology: str, logical: Any) -> Target:
    """Return a target of all GPUs of a cluster; see `make_target`."""
    cluster = cluster_of(topology)
    size = _check_logical(cluster, logical)
    read_memory_fraction()  # raises before the compilation, which takes minutes
    strategy = MirroredStrategy(_gpus.DESCRIBED + cluster.name)
    if size > 1:
        # Neighbours in JAX's order are one replica.
        layout = strategy.layout
        devices = list(layout.devices)
        split = meshes.build(devices, num_logical=size, described=layout.described)
        strategy = strategy._on(split)
    return Target(
        cluster.name, strategy, _make_places(cluster, size), cluster.chip, 1, cluster.domains
    )


def describe_one_like(of: Target) -> Target:
    """Return a target of one GPU of the same kind."""
    ones = "1x1" if of.chip.pod[0] == 1 else "1x1x1"
    return describe(f"{of.chip.name}:{ones}", 1)


def list_logical_counts(topology: str) -> tuple[int, ...]:
    """Return the numbers of logical devices that divide an NVLink domain."""
    within = cluster_of(topology).gpus_of_domain
    return tuple(n for n in range(1, within + 1) if within % n == 0)


@called("compile_for")
def count_slices(topology: str) -> int:
    """Return the number of NVLink domains."""
    return cluster_of(topology).domains


def _check_logical(cluster: GpuCluster, logical: Any) -> int:
    """Return the number of logical devices of a replica."""
    count = int(logical) if isinstance(logical, str) and logical.isdecimal() else logical
    within = cluster.gpus_of_domain
    if not isinstance(count, int) or isinstance(count, bool):
        raise refuse_type(
            f"logical={logical!r} for {cluster.name}.",
            "The logical devices of a replica on GPUs are a number: the GPUs of an NVLink domain "
            "are all joined with each other, so a shape means nothing.",
            f"Pass for instance logical={list_logical_counts(cluster.name)[-1]}.",
        )
    inside = count >= 1 and within % count == 0
    across = count > within and count % within == 0 and cluster.num_gpus % count == 0
    if not inside and not across:
        fitting = list_logical_counts(cluster.name)
        domains = [n for n in range(2, cluster.domains + 1) if cluster.domains % n == 0]
        more = "".join(f", {n * within}" for n in domains)
        raise refuse(
            f"logical={count} for {cluster.name}, which has {within} GPUs in an NVLink domain.",
            "The logical devices of a replica divide a domain, or are whole domains, as are the "
            "stages of a pipeline.",
            f"Use one of {', '.join(map(str, fitting))}{more}.",
            kind=TopologyError,
        )
    return count


def _make_places(cluster: GpuCluster, size: int) -> Places:
    """Return the place of each logical device: GPU in its host, host, domain."""
    number = np.arange(cluster.num_gpus)
    gpu, host = number % cluster.gpus, number // cluster.gpus
    if cluster.chip.pod[0] == 1:
        # Each host is a domain. Arrange hosts in rows and several planes; otherwise a picture of
        # many hosts would be a thin strip.
        rows = _count_hosts_of_plane(cluster.domains)
        shape = (cluster.gpus, rows, cluster.domains // rows, 1)
        where = np.stack([gpu, host % rows, host // rows, 0 * number], axis=-1)
        firsts = range(0, cluster.domains, rows)
        planes = tuple(_name_hosts(first, rows) for first in firsts)
        down = "host" if len(planes) == 1 else "host of the panel"
        joined = Joined.ROWS
    else:
        shape = (cluster.gpus, cluster.hosts, cluster.domains, 1)
        domain = host // cluster.hosts
        where = np.stack([gpu, host % cluster.hosts, domain, 0 * number], axis=-1)
        planes = tuple(f"NVLink domain {n}" for n in range(cluster.domains))
        down = "host"
        joined = Joined.PLANES
    axes = ("GPU of the host", down)
    return Places(where.reshape(-1, size, 4), shape, planes, "GPU", axes, joined=joined)


def _name_hosts(first: int, count: int) -> str:
    return f"host {first}" if count == 1 else f"hosts {first} to {first + count - 1}"


def _count_hosts_of_plane(hosts: int) -> int:
    """Return the hosts in each plane: all, or the largest divisor that fits into a picture."""
    fitting = (n for n in range(_MOST_HOSTS_OF_PLANE, 7, -1) if hosts % n == 0)
    return hosts if hosts <= _MOST_HOSTS_OF_PLANE else next(fitting, hosts)
