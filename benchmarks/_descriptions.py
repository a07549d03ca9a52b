"""Meshes to compile for: CPU devices that are there, and TPUs that only their compiler knows."""

import dataclasses
import importlib.util
import os

import jax
from jax.experimental import topologies

from jaxdist import _mesh


@dataclasses.dataclass(frozen=True)
class Description:
    """TPUs by the name of their topology."""

    name: str
    topology: str
    accelerator: str
    slices: int = 1


V5E = Description("v5e 4x4", "v5e:4x4", "v5litepod-16")
V5P = Description("v5p 2x2x2", "v5p:2x2x2", "v5p-16")
TWO_SLICES = Description("2 slices of v5e 4x4", "v5e:4x4", "v5litepod-16", slices=2)
DESCRIPTIONS = {d.name: d for d in (V5E, V5P, TWO_SLICES)}


def has_tpu_compiler() -> bool:
    """Whether libtpu is installed."""
    found = importlib.util.find_spec("libtpu")
    return found is not None and found.origin is not None


def layout_of(name: str) -> _mesh.ReplicaMesh:
    """A replica on each device: of a description by its name, or of so many CPU devices.

    libtpu is set up by the first description that a process asks for.
    """
    if name.startswith("cpu"):
        return _mesh.build(jax.devices()[: int(name.split()[1])])
    described = DESCRIPTIONS[name]
    os.environ.update(
        TPU_SKIP_MDS_QUERY="1",
        TPU_WORKER_HOSTNAMES="localhost",
        TPU_ACCELERATOR_TYPE=described.accelerator,
        # Other processes compile at the same time.
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",
    )
    more = {"num_slices": described.slices} if described.slices > 1 else {}
    topology = topologies.get_topology_desc(
        platform="tpu", topology_name=described.topology, **more
    )
    return _mesh.build(topology.devices)
