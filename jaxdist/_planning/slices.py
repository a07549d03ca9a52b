"""Makes strategies on slices of TPUs that libtpu only describes."""

from typing import Any

import numpy as np

from jaxdist._called import called, name_call, refuse, refuse_type
from jaxdist._planning.slice_axes import assign_slices
from jaxdist._planning.slice_shape import find_logical_shape, list_counts
from jaxdist._planning.target import Target
from jaxdist._reports import Places
from jaxdist._strategies import TPUStrategy
from jaxdist._validate import CallerRename, check_instance, check_text
from jaxdist.cluster_resolver import TPUClusterResolver
from jaxdist.cost import CHIPS, chip_of
from jaxdist.errors import TopologyError
from jaxdist.tpu import Slice, TPUSystem, slice_of
from jaxdist.tpu.experimental import DeviceAssignment, Topology

# With more, the compiler of libtpu ends the process (kMaxNumSlices).
_MOST_SLICES = 511


def describe(topology: Any, logical: Any) -> Target:
    """Return a target of all cores of a slice; see `make_target`."""
    described = _parse_slice(topology)
    # Check this before libtpu describes the slices: with too many, it would end the process.
    _check_pod(described)
    resolver = TPUClusterResolver(f"described:{_format_name(described)}")
    system = resolver.tpu_system
    box = find_logical_shape(system.topology, described.num_slices, logical)
    assignment = assign_slices(system.topology, box, described.num_slices)
    return _build_target(described, resolver, assignment)


def describe_one_like(of: Target) -> Target:
    """Return a target of one device of the same generation."""
    described = slice_of(f"{slice_of(of.name).generation}:1x1")
    resolver = TPUClusterResolver(f"described:{_format_name(described)}")
    assignment = DeviceAssignment(resolver.tpu_system.topology, [[[0, 0, 0, 0]]])
    return _build_target(described, resolver, assignment)


def list_logical_counts(topology: Any) -> tuple[int, ...]:
    """Return the numbers of logical devices by which a slice can be divided."""
    described = _parse_slice(topology)
    return list_counts(described.topology, described.num_slices)


def count_slices(topology: Any) -> int:
    """Return the number of slices in a name such as `v5e:4x4*2`."""
    return _parse_slice(topology).num_slices


def _build_target(
    described: Slice, resolver: TPUClusterResolver, assignment: DeviceAssignment
) -> Target:
    strategy = TPUStrategy(resolver, assignment)
    return Target(
        _format_name(described),
        strategy,
        Places.from_assignment(assignment, described.num_slices),
        chip_of(strategy.layout.devices[0]),
        int(assignment.topology.mesh_shape[3]),
        described.num_slices,
    )


@called("compile_for")
def _parse_slice(topology: Any) -> Slice:
    if isinstance(topology, Slice):
        return topology
    if isinstance(topology, TPUSystem):
        topology = topology.name
    if isinstance(topology, Topology):
        raise refuse_type(
            f"topology={topology!r}.",
            "A plan needs the generation of the TPU, and a Topology has only the places of cores.",
            "Pass the name of the slice, such as 'v5e:4x4', or jaxdist.tpu.slice_of('v5e:4x4').",
        )
    remedy = "Pass its name: 'v5p:8x8x8', 'v5e:4x4*2' for two slices, or 'h100:4x8' for GPUs."
    what = "a slice of TPUs, or GPUs"
    check_instance("topology", topology, str, what, remedy)
    check_text("topology", topology, "v5e:4x4")
    # "local" is a valid name for a resolver, so this error names the right call.
    if topology == "local":
        raise refuse(
            "topology='local'.",
            "A plan is for TPUs or GPUs that this machine does not have.",
            "Call strategy.lower(step, args).explain(), or name a slice, such as 'v5p:8x8x8'.",
        )
    # Users may pass the name that they gave to a resolver.
    with CallerRename("tpu.slice_of was given name=", f"{name_call()} was given topology="):
        return slice_of(topology.removeprefix("described:").removeprefix("virtual:"))


def _format_name(described: Slice) -> str:
    more = f"*{described.num_slices}" if described.num_slices > 1 else ""
    return described.name + more


@called("compile_for")
def _check_pod(described: Slice) -> None:
    if described.num_slices > _MOST_SLICES:
        raise refuse(
            f"{described.num_slices:,} slices of {described.name}.",
            f"The compiler of libtpu takes {_MOST_SLICES} slices at most.",
            f"Use fewer and larger slices, for instance '{described.name}*{_MOST_SLICES}'.",
            kind=TopologyError,
        )
    chip = CHIPS[described.generation.removeprefix("tpu")]
    chips = int(np.prod(described.shape))
    if chips > chip.pod_chips:
        largest = "x".join(map(str, chip.pod))
        raise refuse(
            f"the slice {described.name}, which has {chips:,} chips.",
            f"The largest slice of {described.generation} has {chip.pod_chips:,} chips.",
            f"Use several slices, for instance {described.generation}:{largest}*"
            f"{-(-chips // chip.pod_chips)}, or fewer chips.",
            kind=TopologyError,
        )
