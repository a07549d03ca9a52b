"""Callables of `tf.distribute.experimental` that are deprecated, and call the newer ones."""

import warnings

from jaxdist import _strategies
from jaxdist.cluster_resolver import TPUClusterResolver
from jaxdist.tpu.experimental import DeviceAssignment


def TPUStrategy(
    tpu_cluster_resolver: TPUClusterResolver | None = None,
    device_assignment: DeviceAssignment | None = None,
) -> _strategies.TPUStrategy:
    """Make a `jaxdist.TPUStrategy`; this name is deprecated.

    Args:
        tpu_cluster_resolver: The TPUs; None means those of this machine.
        device_assignment: The core of each logical device of each replica.

    Returns:
        A `jaxdist.TPUStrategy`.

    Raises:
        NotFoundError: No TPU was found.

    Example:
        >>> import warnings
        >>> resolver = jaxdist.cluster_resolver.TPUClusterResolver("virtual:v5e:2x4")
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore")
        ...     jaxdist.experimental.TPUStrategy(resolver).num_replicas_in_sync
        8

    Source:
        `tf.distribute.experimental.TPUStrategy`.
    """
    warnings.warn(
        "jaxdist.experimental.TPUStrategy is deprecated; use jaxdist.TPUStrategy, where "
        "device_assignment is called experimental_device_assignment.",
        DeprecationWarning,
        stacklevel=2,
    )
    _strategies.check_assignment("device_assignment", device_assignment)
    return _strategies.TPUStrategy(tpu_cluster_resolver, device_assignment)
