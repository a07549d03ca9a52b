"""The earlier name of `TPUStrategy`."""

import warnings

from jaxdist.cluster_resolver import TPUClusterResolver
from jaxdist._strategies import tpu as _tpu
from jaxdist.tpu.experimental import DeviceAssignment


def TPUStrategy(
    tpu_cluster_resolver: TPUClusterResolver | None = None,
    device_assignment: DeviceAssignment | None = None,
) -> _tpu.TPUStrategy:
    """Make a `jaxdist.TPUStrategy`; this name of it is deprecated.

    Args:
        tpu_cluster_resolver: Which TPUs; None is those of this machine.
        device_assignment: Which core each logical device of each replica is.

    Returns:
        A `jaxdist.TPUStrategy`.

    Raises:
        NotFoundError: There is no TPU.

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
    _tpu.check_assignment("device_assignment", device_assignment)
    return _tpu.TPUStrategy(tpu_cluster_resolver, device_assignment)
