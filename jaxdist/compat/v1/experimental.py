"""Documented names under `tf.compat.v1.distribute.experimental`."""

from typing import TYPE_CHECKING

from jaxdist._late import open_late as _open_late

if TYPE_CHECKING:
    from jaxdist._collectives import CollectiveHints as CollectiveHints
    from jaxdist._collectives import CommunicationImplementation as CommunicationImplementation
    from jaxdist._collectives import CommunicationOptions as CommunicationOptions
    from jaxdist.compat.v1._parameter_server import (
        ParameterServerStrategy as ParameterServerStrategy,
    )
    from jaxdist.compat.v1._strategies import CentralStorageStrategy as CentralStorageStrategy
    from jaxdist.compat.v1._strategies import (
        MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
    )
    from jaxdist.compat.v1._strategies import TPUStrategy as TPUStrategy

    CollectiveCommunication = CommunicationImplementation

_open_late(__name__)
