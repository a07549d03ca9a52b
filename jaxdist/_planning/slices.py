"""Makes strategies on slices that libtpu only describes, and the box of cores of each replica."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxdist._called import called, refuse, refuse_type
from jaxdist._planning.slice_axes import Target, assign_slices
from jaxdist._reports import Places
from jaxdist._strategies import TPUStrategy
from jaxdist._validate import check_instance, check_text, show
from jaxdist.cluster_resolver import TPUClusterResolver
from jaxdist.cost import CHIPS, chip_of
from jaxdist.errors import TopologyError
from jaxdist.tpu import AXES, Slice, TPUSystem, slice_of
from jaxdist.tpu.experimental import DeviceAssignment, Topology

Box = tuple[int, int, int, int]


@called("compile_for")
def find_logical_shape(topology: Topology, num_slices: int, logical: Any) -> Box:
    """Return the sizes of a replica's box in x, y, z and cores of a chip.

    A box divides the mesh, so every core is used. It is within one slice, since ICI does not
    connect slices.

    Args:
        topology: The cores. All slices are in one topology, one after the other in z.
        num_slices: The number of slices.
        logical: A number of logical devices, for which this chooses the most compact box; or a
            shape: 2 to 4 sizes, or text such as `"2x2"`.

    Raises:
        TopologyError: The box does not fit or does not divide the slice, or no box has this number
            of cores.
        ArgumentTypeError: `logical` is neither a number nor a shape.

    Example:
        >>> v5e = jaxdist.tpu.slice_of("v5e:4x4").topology
        >>> find_logical_shape(v5e, 1, 4), find_logical_shape(v5e, 1, "4x1")
        ((2, 2, 1, 1), (4, 1, 1, 1))
    """
    sizes = _parse_logical(logical)
    x, y, z, cores = topology.mesh_shape.tolist()
    within = (x, y, z // num_slices, cores)
    if isinstance(sizes, int):
        return _find_most_compact(within, sizes)
    box: Any = (*sizes, *(1,) * (4 - len(sizes)))
    bad = [
        f"{size} in {axis}, and there are {there}"
        for axis, size, there in zip(AXES, box, within, strict=True)
        if there % size
    ]
    if bad:
        count = math.prod(box)
        raise refuse(
            f"logical={logical!r}, and the slice has {_format_sizes(within)} in {', '.join(AXES)}"
            f": {'; '.join(bad)}.",
            "The shape of a replica divides the slice.",
            _suggest_shapes(within, count),
            kind=TopologyError,
        )
    return box


def list_counts(topology: Topology, num_slices: int) -> tuple[int, ...]:
    """Return all numbers of logical devices for which a box exists."""
    x, y, z, cores = topology.mesh_shape.tolist()
    return _list_counts((x, y, z // num_slices, cores))


def _parse_logical(logical: Any) -> int | tuple[int, ...]:
    if isinstance(logical, str):
        parts = logical.split("x")
        if not all(p.isdigit() for p in parts):
            raise refuse(
                f"logical={logical!r}.",
                "logical is a number of logical devices, or a shape of chips in x, y and z.",
                "Pass for instance logical='2x2', or logical=4.",
                kind=TopologyError,
            )
        sizes = [int(p) for p in parts]
        return _check_sizes(sizes) if len(sizes) > 1 else _check_positive(sizes[0])
    # A bool is an int in Python, and `logical=True` is a mistake.
    if isinstance(logical, int) and not isinstance(logical, bool):
        return _check_positive(logical)
    if isinstance(logical, Sequence) and all(type(n) is int for n in logical):
        return _check_sizes(list(logical))
    raise refuse_type(
        f"logical={show(logical)}.",
        "logical is a number or a shape.",
        "Pass a number of logical devices, such as 4, or a shape in x, y and z, such as '2x2'.",
    )


def _check_positive(number: int) -> int:
    if number < 1:
        raise refuse(
            f"logical={number}.",
            "A replica has 1 logical device or more.",
            "Pass for instance logical=1.",
            kind=TopologyError,
        )
    return number


def _check_sizes(sizes: list[int]) -> tuple[int, ...]:
    if not 2 <= len(sizes) <= 4 or min(sizes) < 1:
        raise refuse(
            f"logical={show(_format_sizes(sizes))}, which is not a shape of logical devices.",
            f"It has 2 to 4 sizes, in {', '.join(AXES)}, each 1 or more.",
            "Pass for instance logical='2x2'.",
            kind=TopologyError,
        )
    return tuple(sizes)


def _find_most_compact(within: Sequence[int], number: int) -> Box:
    fitting = [box for box in _list_boxes(within) if math.prod(box) == number]
    if not fitting:
        raise refuse(
            f"logical={number}, and no box of {number} cores divides a slice of "
            f"{_format_sizes(within)} in {', '.join(AXES)}.",
            "The logical devices of a replica are a box of cores, and the slice is made of such "
            "boxes.",
            _suggest_shapes(within, number),
            kind=TopologyError,
        )
    # The cores of a chip come first, since they are closest. Then comes the box most like a cube,
    # which has the shortest paths over ICI; ties prefer x to y to z.
    return min(fitting, key=lambda box: (-box[3], sum(box[:3]), [-size for size in box[:3]]))


def _suggest_shapes(within: Sequence[int], number: int) -> str:
    shapes = [_format_sizes(box) for box in _list_boxes(within) if math.prod(box) == number]
    if shapes:
        return f"Use one of {', '.join(shapes[:8])}."
    # No box has this number of cores, so suggest the nearest numbers.
    near = sorted(_list_counts(within), key=lambda n: abs(n - number))[:4]
    return f"Use one of the numbers {', '.join(map(str, sorted(near)))}."


def _list_counts(within: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted({math.prod(box) for box in _list_boxes(within)}))


def _list_boxes(within: Sequence[int]) -> list[Box]:
    divisors = [[d for d in range(1, n + 1) if n % d == 0] for n in within]
    return [(a, b, c, d) for a, b, c, d in itertools.product(*divisors)]


def _format_sizes(sizes: Sequence[int]) -> str:
    return "x".join(map(str, sizes))


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


@called("compile_for", replaces="tpu.slice_of", arguments={"name=": "topology="})
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
