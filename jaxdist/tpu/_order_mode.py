"""In which order replicas and their cores follow each other."""

import enum


class DeviceOrderMode(enum.IntEnum):
    """In which order `DeviceAssignment.build` lists replicas, and the cores of each.

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
    """A ring where there is one, else along the axes."""

    RING = 1
    """Each a neighbour of the one before, the last of the first; an error where there is none."""

    MESH = 2
    """Along the axes: the cores of a chip, then x, y, z."""
