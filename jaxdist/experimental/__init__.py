"""Documented names under `tf.distribute.experimental`."""

import warnings as _warnings

from jaxdist._collectives import CollectiveAllReduce as CollectiveAllReduce
from jaxdist._collectives import CollectiveHints as CollectiveHints
from jaxdist._collectives import CommunicationImplementation as CommunicationImplementation
from jaxdist._collectives import CommunicationOptions as CommunicationOptions
from jaxdist._not_there import explain_missing as _explain_missing
from jaxdist._parameter_server import ParameterServerStrategy as ParameterServerStrategy
from jaxdist._preemption import PreemptionCheckpointHandler as PreemptionCheckpointHandler
from jaxdist._preemption import PreemptionWatcher as PreemptionWatcher
from jaxdist._preemption import TerminationConfig as TerminationConfig
from jaxdist._strategies import CentralStorageStrategy as CentralStorageStrategy
from jaxdist._strategies import (
    ExperimentalMultiWorkerMirroredStrategy as _MultiWorkerMirroredStrategy,
)
from jaxdist._strategies import TPUStrategy as _TPUStrategy
from jaxdist._strategies import check_assignment as _check_assignment
from jaxdist.cluster_resolver import TPUClusterResolver as _TPUClusterResolver
from jaxdist.data import AutoShardPolicy as AutoShardPolicy
from jaxdist.data import ValueContext as ValueContext
from jaxdist.experimental import coordinator as coordinator
from jaxdist.experimental import partitioners as partitioners
from jaxdist.experimental import rpc as rpc
from jaxdist.tpu.experimental import DeviceAssignment as _DeviceAssignment

# The older name of `CommunicationImplementation`.
CollectiveCommunication = CommunicationImplementation
MultiWorkerMirroredStrategy = _MultiWorkerMirroredStrategy


def TPUStrategy(
    tpu_cluster_resolver: _TPUClusterResolver | None = None,
    device_assignment: _DeviceAssignment | None = None,
) -> _TPUStrategy:
    """Make a `jaxdist.TPUStrategy`; this name is deprecated.

    Args:
        tpu_cluster_resolver: The TPUs; None for those of this machine.
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
    _warnings.warn(
        "jaxdist.experimental.TPUStrategy is deprecated; use jaxdist.TPUStrategy, where "
        "device_assignment is called experimental_device_assignment.",
        DeprecationWarning,
        stacklevel=2,
    )
    _check_assignment("device_assignment", device_assignment)
    return _TPUStrategy(tpu_cluster_resolver, device_assignment)


_explain_missing(__name__)
