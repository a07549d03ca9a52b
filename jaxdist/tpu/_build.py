"""`compute_core_assignment`: computes the cores of each replica, in TensorFlow's order."""

import itertools
import logging
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from jaxdist._called import refuse, refuse_type
from jaxdist._validate import show
from jaxdist.errors import TopologyError
from jaxdist.tpu._options import DeviceOrderMode
from jaxdist.tpu._topology import AXES, Topology, as_integers

_LOG = logging.getLogger("jaxdist")
_CALLER = "DeviceAssignment.build"

Place: TypeAlias = tuple[int, int, int]


def compute_core_assignment(
    topology: Topology,
    computation_shape: Any,
    computation_stride: Any,
    num_replicas: int,
    mode: DeviceOrderMode,
) -> np.ndarray:
    """Return the coordinates of the cores of every replica, `[replicas, cores of a replica, 4]`."""
    mesh = topology.mesh_shape
    shape = _parse_sizes("computation_shape", computation_shape)
    stride = _parse_sizes("computation_stride", computation_stride)
    footprint = shape * stride
    if (footprint > mesh).any():
        raise refuse(
            f"computation_shape {shape.tolist()} and computation_stride {stride.tolist()}, whose "
            f"product is {footprint.tolist()} in {', '.join(AXES)}, and the mesh is "
            f"{mesh.tolist()}.",
            "A replica must fit into the mesh.",
            f"Make each product of shape and stride at most {mesh.tolist()}.",
            kind=TopologyError,
        )
    # With a stride, the gaps between the cores of one replica hold other replicas.
    copies = mesh // footprint * stride
    _check_number(num_replicas, int(np.prod(copies)), shape, stride, mesh)
    if len(topology.missing_devices):
        return _place_on_present_devices(topology, shape, stride, num_replicas, mode)
    # A ring of replicas visits all chips of a box, so it needs contiguous replicas of whole chips,
    # and as many as fit.
    can_ring = shape[3] == mesh[3] and (stride == 1).all() and num_replicas == int(np.prod(copies))
    if mode is DeviceOrderMode.RING and not can_ring:
        raise TopologyError(_explain_missing_ring(shape, stride, num_replicas, copies, mesh))
    box = _replicas_per_dim(num_replicas, copies.tolist())
    if can_ring and mode is not DeviceOrderMode.MESH:
        return _place_on_rings(shape, box)
    return _place_along_axes(shape, stride, footprint, num_replicas, box)


def _parse_sizes(name: str, value: Any) -> np.ndarray:
    if value is None:
        return np.ones(4, np.int32)
    four = as_integers(f"{_CALLER}: {name}", value)
    if four.shape != (4,):
        raise TopologyError(
            f"{_CALLER}: {name} has shape {list(four.shape)}.\n\n"
            f"It has 4 sizes: {', '.join(AXES)}.\n\n"
            "Pass for instance [1, 1, 1, 2] for both cores of a chip."
        )
    if (four < 1).any():
        raise TopologyError(
            f"{_CALLER}: {name} is {four.tolist()}.\n\nEach size must be 1 or more.\n\n"
            f"Use {np.maximum(four, 1).tolist()}, or leave {name} out for [1, 1, 1, 1]."
        )
    return four


def _check_number(
    num_replicas: Any, most: int, shape: np.ndarray, stride: np.ndarray, mesh: np.ndarray
) -> None:
    if not isinstance(num_replicas, (int, np.integer)) or isinstance(num_replicas, bool):
        raise refuse_type(
            f"num_replicas={show(num_replicas)}.",
            "num_replicas is one integer.",
            f"Pass a number from 0 to {most}.",
        )
    if num_replicas < 0:
        raise refuse(
            f"num_replicas={num_replicas}, which is negative.",
            f"num_replicas is a number from 0 to {most} on this mesh.",
            f"Pass num_replicas={most}.",
        )
    if num_replicas > most:
        cores = int(np.prod(mesh))
        each = cores // num_replicas
        smaller = (
            f", or make replicas smaller: {each} of the {cores} cores for each" if each else ""
        )
        raise refuse(
            f"num_replicas={num_replicas}, and {most} of computation_shape {shape.tolist()} with "
            f"computation_stride {stride.tolist()} fit into the mesh {mesh.tolist()}.",
            "Each core belongs to one replica.",
            f"Pass num_replicas={most} or less{smaller}.",
            kind=TopologyError,
        )


def _explain_missing_ring(
    shape: np.ndarray, stride: np.ndarray, num_replicas: int, copies: np.ndarray, mesh: np.ndarray
) -> str:
    reasons = []
    if shape[3] != mesh[3]:
        reasons.append(f"a replica has {shape[3]} of the {mesh[3]} cores of a chip")
    if (stride != 1).any():
        reasons.append(f"computation_stride is {stride.tolist()} and not all 1")
    if num_replicas != np.prod(copies):
        reasons.append(f"{num_replicas} of the {int(np.prod(copies))} replicas that fit are used")
    return (
        f"{_CALLER} was given device_order_mode=DeviceOrderMode.RING, and there is no ring: "
        f"{', and '.join(reasons)}.\n\n"
        "A ring needs whole chips, no stride, and as many replicas as fit.\n\n"
        "Use DeviceOrderMode.AUTO, which makes a ring if one exists."
    )


def _replicas_per_dim(num_replicas: int, copies: Sequence[int]) -> list[int]:
    """Return the number of replicas in each dim: as close to a cube as fits, tightest dim first.

    Among equally tight dims, the cores of a chip come first, then x, y, z, so that neighbours share
    a chip first, then a host.
    """
    box = [0] * 4
    if num_replicas == 0:
        return box
    remaining = num_replicas
    # These formulas, including the floating-point root, are TensorFlow's: assignments must equal
    # those of `tf.tpu.experimental.DeviceAssignment.build` (`tests/tpu/` compares them).
    order = sorted(range(4), key=lambda dim: (copies[dim], (dim + 1) % 4))
    for left, dim in zip((4, 3, 2, 1), order, strict=True):
        wanted = math.ceil(remaining ** (1.0 / left))
        box[dim] = min(wanted, copies[dim])
        remaining = -(-remaining // box[dim])
    return box


def _place_on_rings(shape: np.ndarray, box: Sequence[int]) -> np.ndarray:
    cores = range(int(shape[3]))
    inner = [(*place, core) for place in make_ring(*shape[:3].tolist()) for core in cores]
    outer = [(*place, 0) for place in make_ring(*box[:3])]
    return np.asarray(outer, np.int32)[:, None] * shape + np.asarray(inner, np.int32)


def _place_along_axes(
    shape: np.ndarray, stride: np.ndarray, footprint: np.ndarray, num_replicas: int, box: list[int]
) -> np.ndarray:
    """Place replicas along the axes of the mesh.

    From replica to replica the core varies fastest, then x, y, z. Within one replica the core
    varies fastest, then z, y, x.
    """
    inner = np.asarray(list(itertools.product(*map(range, shape.tolist()))), np.int32) * stride
    digits = np.empty((num_replicas, 4), np.int32)
    left = np.arange(num_replicas)
    for dim in (3, 0, 1, 2):
        digits[:, dim], left = left % max(box[dim], 1), left // max(box[dim], 1)
    # `digits // stride` selects the footprint, and `digits % stride` the position in its gaps.
    offsets = digits // stride * footprint + digits % stride
    return offsets[:, None] + inner


def _place_on_present_devices(
    topology: Topology,
    shape: np.ndarray,
    stride: np.ndarray,
    num_replicas: int,
    mode: DeviceOrderMode,
) -> np.ndarray:
    """Assign devices task by task: boxes of replicas do not fit a mesh with missing devices."""
    cores = int(np.prod(shape))
    devices = topology.device_coordinates.reshape(-1, 4)
    missing = len(topology.missing_devices)
    # Without boxes, neighbours and distances have no meaning.
    if (stride != 1).any() or mode is DeviceOrderMode.RING:
        what = (
            "DeviceOrderMode.RING"
            if mode is DeviceOrderMode.RING
            else f"computation_stride {stride.tolist()}"
        )
        raise refuse(
            f"{what}, and {missing} device(s) of the mesh are missing, at "
            f"{topology.missing_devices[:8].tolist()}.",
            "A stride and a ring need a mesh without missing devices.",
            "Leave computation_stride and device_order_mode out: replicas then get devices task "
            "by task.",
            kind=TopologyError,
        )
    if num_replicas * cores > len(devices):
        raise TopologyError(
            f"{_CALLER}: num_replicas={num_replicas} of {cores} core(s) need "
            f"{num_replicas * cores} devices, "
            f"and the topology has {len(devices)}: {missing} are missing.\n\n"
            "Each device belongs to one replica.\n\n"
            f"Pass num_replicas={len(devices) // cores} or less."
        )
    return devices[: num_replicas * cores].reshape(num_replicas, cores, 4)


def make_ring(width: int, height: int, depth: int) -> list[Place]:
    """Return every `(x, y, z)` of a box once, in a closed path of neighbours.

    Each place is one step from the previous one, and the last is one step from the first. A line
    (one size above 1) is returned in order. If a size is odd, such a path may not exist; then x
    varies fastest, and a warning is logged.

    Example:
        >>> make_ring(2, 2, 1)
        [(0, 0, 0), (1, 0, 0), (1, 1, 0), (0, 1, 0)]

    Source:
        `DeviceOrderMode.RING` of `tf.tpu.experimental`.
    """
    sizes = (width, height, depth)
    longer = [size for size in sizes if size > 1]
    if len(longer) <= 1:
        return _list_x_fastest(*sizes)
    if any(size % 2 for size in longer):
        _LOG.warning("No ring in a %dx%dx%d box, since a size is odd; x runs fastest.", *sizes)
        return _list_x_fastest(*sizes)
    if depth == 1:
        return [(0, 0, 0), *((x, y, 0) for x, y in _make_loop(width, height))]
    if width == 1:
        return [(0, 0, 0), *((0, y, z) for y, z in _make_loop(height, depth))]
    if height == 1:
        return [(0, 0, 0), *((x, 0, z) for x, z in _make_loop(width, depth))]
    # Each layer visits all places except (0, 0), alternately forward and backward. The column at
    # (0, 0) stays free for the way back from the last layer to the first.
    plane = _make_loop(width, height)
    path = [(0, 0, 0)]
    for z in range(depth):
        path += [(x, y, z) for x, y in (plane[::-1] if z % 2 else plane)]
    return [*path, *((0, 0, z) for z in range(depth - 1, 0, -1))]


def _make_loop(width: int, height: int) -> list[tuple[int, int]]:
    """Return a path of neighbours through a plane of even sizes, without (0, 0).

    The path starts and ends next to (0, 0).
    """
    path: list[tuple[int, int]] = []
    for y in range(0, height, 2):
        path += [(x, y) for x in range(1, width)]
        path += [(x, y + 1) for x in range(width - 1, 0, -1)]
    return [*path, *((0, y) for y in range(height - 1, 0, -1))]


def _list_x_fastest(width: int, height: int, depth: int) -> list[Place]:
    zyx = itertools.product(range(depth), range(height), range(width))
    return [(x, y, z) for z, y, x in zyx]
