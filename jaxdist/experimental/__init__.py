"""Documented names under `tf.distribute.experimental`."""

from typing import TYPE_CHECKING

from jaxdist._late import open_late as _open_late

if TYPE_CHECKING:
    from jaxdist._collectives import CollectiveAllReduce as CollectiveAllReduce
    from jaxdist._collectives import CollectiveHints as CollectiveHints
    from jaxdist._collectives import CommunicationImplementation as CommunicationImplementation
    from jaxdist._collectives import CommunicationOptions as CommunicationOptions
    from jaxdist._parameter_server import ParameterServerStrategy as ParameterServerStrategy
    from jaxdist._preemption import PreemptionCheckpointHandler as PreemptionCheckpointHandler
    from jaxdist._preemption import PreemptionWatcher as PreemptionWatcher
    from jaxdist._preemption import TerminationConfig as TerminationConfig
    from jaxdist._strategies import CentralStorageStrategy as CentralStorageStrategy
    from jaxdist._strategies import (
        ExperimentalMultiWorkerMirroredStrategy as _MultiWorkerMirroredStrategy,
    )
    from jaxdist.data import AutoShardPolicy as AutoShardPolicy
    from jaxdist.data import ValueContext as ValueContext
    from jaxdist.experimental import coordinator as coordinator
    from jaxdist.experimental import partitioners as partitioners
    from jaxdist.experimental import rpc as rpc
    from jaxdist.experimental._deprecated import TPUStrategy as TPUStrategy

    # The older name of `CommunicationImplementation`.
    CollectiveCommunication = CommunicationImplementation
    MultiWorkerMirroredStrategy = _MultiWorkerMirroredStrategy

_open_late(__name__)
