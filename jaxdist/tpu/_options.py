"""Options of TPUs: the order of devices, and the options of XLA in `RunOptions`."""

import enum
from typing import NamedTuple


class DeviceOrderMode(enum.IntEnum):
    """The order in which `DeviceAssignment.build` places replicas and the cores of each replica.

    Example:
        >>> topology = jaxdist.tpu.slice_of("v5e:2x2").topology
        >>> mesh_order = jaxdist.tpu.experimental.DeviceOrderMode.MESH
        >>> jaxdist.tpu.experimental.DeviceAssignment.build(
        ...     topology, num_replicas=4, device_order_mode=mesh_order)
        DeviceAssignment(4 replicas x 1 core: 0000|1000|0100|1100)

    Source:
        `tf.tpu.experimental.DeviceOrderMode`.
    """

    AUTO = 0
    """A ring if there is one, else along the axes."""

    RING = 1
    """A closed path, in which each is a neighbour of the previous one; an error if none exists."""

    MESH = 2
    """Along the axes: the cores of a chip, then x, y, z."""


class XLAOptions(NamedTuple):
    """The type of `RunOptions(experimental_xla_options=...)`.

    Args:
        use_spmd_for_xla_partitioning: Has no effect: XLA always partitions a replica by SPMD.
        enable_xla_dynamic_padder: Has no effect: programs have static shapes.
        use_shardy_partitioner: Has no effect: JAX's setting `jax_use_shardy_partitioner` selects
            the partitioner.

    A step logs values that differ from the default.

    Example:
        >>> options = RunOptions(experimental_xla_options=jaxdist.tpu.XLAOptions())
        >>> options.experimental_xla_options.use_spmd_for_xla_partitioning
        True

    Source:
        `tf.tpu.XLAOptions`.
    """

    use_spmd_for_xla_partitioning: bool = True
    enable_xla_dynamic_padder: bool = True
    use_shardy_partitioner: bool = False
