"""`order_cores`: the order of replicas, one on each core, whose collectives the compiler keeps.

# Note [Order of chips]
On slices that are 3D tori (v4, v5p and tpu7x, all sizes multiples of 4), the compiler for TPUs
turns an all-gather over all chips into an all-reduce of arrays filled up with zeros, which sends
twice the bytes, unless the chips follow each other row by row, dim by dim. Orders host by host,
rings, and rows in alternating directions do not keep it, but for small arrays in a few orders of
hosts. On other slices, and over a part of a slice, the orders that were tried keep it.
`tests/tpu/test_order.py` has the table.

Row by row, the replicas of a host of 2x2x1 chips are no neighbours. `ReplicaMesh` knows the owner
of each replica, and nothing relies on neighbours.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxdist._validate import as_integer, check_instance
from jaxdist.errors import TopologyError
from jaxdist.tpu._topology import Topology

# Optical switches join cubes of 4x4x4 chips: cloud.google.com/tpu/docs, pages v4, v5p and tpu7x.
_CUBE = 4


def is_torus(topology: Topology, num_slices: int = 1) -> bool:
    """Whether each slice is a 3D torus: its last chip in x, y and z has a link to the first one.

    Args:
        topology: The cores. All slices are in one topology, one after the other in z.
        num_slices: The number of slices.

    Raises:
        ArgumentTypeError: `topology` is no `Topology`.
        TopologyError: The slices are not equal.

    Example:
        >>> cube, flat = (jaxdist.tpu.slice_of(name) for name in ("v5p:4x4x4", "v5e:4x4"))
        >>> jaxdist.tpu.is_torus(cube.topology), jaxdist.tpu.is_torus(flat.topology)
        (True, False)
    """
    return is_made_of_cubes(_measure_slice("tpu.is_torus", topology, num_slices))


def order_cores(topology: Topology, num_slices: int = 1) -> np.ndarray:
    """Return the coordinates of all cores in the order of a strategy's replicas, `[cores, 4]`.

    The order is that of the topology, task by task. On a 3D torus it is row by row, the only order
    in which the compiler for TPUs keeps an all-gather over all chips.

    Args:
        topology: The cores. All slices are in one topology, one after the other in z.
        num_slices: The number of slices.

    Raises:
        ArgumentTypeError: `topology` is no `Topology`.
        TopologyError: The slices are not equal.

    Example:
        >>> topology = jaxdist.tpu.slice_of("v5p:4x4x4").topology
        >>> jaxdist.tpu.order_cores(topology)[:5, :3].tolist()
        [[0, 0, 0], [1, 0, 0], [2, 0, 0], [3, 0, 0], [0, 1, 0]]
        >>> assignment = jaxdist.tpu.experimental.DeviceAssignment(
        ...     topology, jaxdist.tpu.order_cores(topology)[:, None])
    """
    shape = _measure_slice("tpu.order_cores", topology, num_slices)
    cores = topology.device_coordinates.reshape(-1, 4)
    if not is_made_of_cubes(shape):
        return cores
    # The last key is the slowest: z, then y, x and the core.
    return cores[np.lexsort(cores[:, [3, 0, 1, 2]].T)]


def is_made_of_cubes(shape: Sequence[int]) -> bool:
    """Whether all sizes of a slice are multiples of 4; flat slices have a size of 1."""
    return not any(size % _CUBE for size in shape)


def _measure_slice(caller: str, topology: Any, num_slices: Any) -> tuple[int, int, int]:
    remedy = "Pass for instance jaxdist.tpu.slice_of('v5p:4x4x4').topology."
    check_instance(caller, "topology", topology, Topology, "a Topology", remedy)
    count = as_integer(caller, "num_slices", num_slices, least=1)
    x, y, z, _ = topology.mesh_shape.tolist()
    if z % count:
        raise TopologyError(
            f"{caller} was given num_slices={count} and {topology!r}, of {z} chips in z.\n\n"
            "Slices are equal, one after the other in z.\n\n"
            f"Pass a number of slices that divides {z}."
        )
    return x, y, z // count
