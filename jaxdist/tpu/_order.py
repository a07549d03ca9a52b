"""`order_cores`: orders replicas, one on each core, so that the compiler keeps their collectives.

# Note [Order of chips]
On slices that are 3D tori (v4, v5p and tpu7x, all sizes multiples of 4), the compiler for TPUs
turns an all-gather over all chips into an all-reduce of zero-padded arrays, which sends twice the
bytes, unless the chips follow each other row by row, dim by dim. Orders host by host, rings, and
rows in alternating directions do not keep the all-gather, except for small arrays in a few orders
of hosts. On other slices, and over a part of a slice, all orders that were tried keep it.
`tests/tpu/test_order.py` has the table.

On square slices (4x4, 8x8, 16x16) a reduce-scatter over all chips becomes an all-reduce in every
order, but over half of the slice it does not. There, consecutive replicas are on chips of different
halves: then a reduce-scatter within the halves, and one across them, give each replica the same
piece as a single reduce-scatter. On tori, planes replace the halves. See Note [Scatter in two
stages].

In these orders, the replicas of a host are not consecutive. `ReplicaMesh` knows the owner of each
replica, and nothing relies on consecutive ones.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxdist._called import called, refuse
from jaxdist._validate import as_integer, check_instance
from jaxdist.errors import TopologyError
from jaxdist.tpu._topology import Topology

# Optical switches join cubes of 4x4x4 chips: cloud.google.com/tpu/docs, pages v4, v5p and tpu7x.
_CUBE = 4


@called("tpu.is_reordered")
def is_reordered(topology: Topology, num_slices: int = 1) -> bool:
    """Whether the order of `order_cores` differs from that of the topology, task by task.

    It does on 3D tori, and on square slices of 4x4 chips or more with one core per chip.

    Args:
        topology: The cores. All slices are in one topology, one after the other in z.
        num_slices: The number of slices.

    Raises:
        ArgumentTypeError: `topology` is not a `Topology`.
        TopologyError: The slices are not equal.

    Example:
        >>> names = ("v5p:4x4x4", "v5e:4x4", "v5e:4x8")
        >>> [jaxdist.tpu.is_reordered(jaxdist.tpu.slice_of(name).topology) for name in names]
        [True, True, False]
    """
    shape = _measure_slice(topology, num_slices)
    return is_made_of_cubes(shape) or _is_square(topology, shape)


@called("tpu.order_cores")
def order_cores(topology: Topology, num_slices: int = 1) -> np.ndarray:
    """Return the coordinates of all cores in the order of a strategy's replicas, `[cores, 4]`.

    The order is normally that of the topology, task by task. On a 3D torus it is row by row, the
    only order in which the compiler for TPUs keeps an all-gather over all chips. On a square slice
    it alternates between chips of the two halves, so that a reduce-scatter can run in two stages.
    Slices follow one another.

    Args:
        topology: The cores. All slices are in one topology, one after the other in z.
        num_slices: The number of slices.

    Raises:
        ArgumentTypeError: `topology` is not a `Topology`.
        TopologyError: The slices are not equal.

    Example:
        >>> topology = jaxdist.tpu.slice_of("v5p:4x4x4").topology
        >>> jaxdist.tpu.order_cores(topology)[:5, :3].tolist()
        [[0, 0, 0], [1, 0, 0], [2, 0, 0], [3, 0, 0], [0, 1, 0]]
        >>> assignment = jaxdist.tpu.experimental.DeviceAssignment(
        ...     topology, jaxdist.tpu.order_cores(topology)[:, None])
    """
    shape = _measure_slice(topology, num_slices)
    cores = topology.device_coordinates.reshape(-1, 4)
    # The last key varies slowest.
    if is_made_of_cubes(shape):
        return cores[np.lexsort(cores[:, [3, 0, 1, 2]].T)]
    if _is_square(topology, shape):
        x, y, of_slice, _ = cores.T
        half = shape[1] // 2
        return cores[np.lexsort((y // half, x, y % half, of_slice))]
    return cores


def is_made_of_cubes(shape: Sequence[int]) -> bool:
    """Whether all sizes of a slice are multiples of 4; flat slices have a size of 1."""
    return not any(size % _CUBE for size in shape)


def _is_square(topology: Topology, shape: Sequence[int]) -> bool:
    """Whether the slices are flat, have two equal even sizes of 4 or more, and one core a chip."""
    x, y, z = shape
    is_flat = z == 1 and int(topology.mesh_shape[3]) == 1
    return is_flat and x == y and x >= _CUBE and x % 2 == 0


def _measure_slice(topology: Any, num_slices: Any) -> tuple[int, int, int]:
    remedy = "Pass for instance jaxdist.tpu.slice_of('v5p:4x4x4').topology."
    check_instance("topology", topology, Topology, "a Topology", remedy)
    count = as_integer("num_slices", num_slices, least=1)
    x, y, z, _ = topology.mesh_shape.tolist()
    if z % count:
        raise refuse(
            f"num_slices={count} and {topology!r}, of {z} chips in z.",
            "Slices are equal, one after the other in z.",
            f"Pass a number of slices that divides {z}.",
            kind=TopologyError,
        )
    return x, y, z // count
