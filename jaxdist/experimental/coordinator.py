"""Documented names under `tf.distribute.experimental.coordinator`."""

from typing import TYPE_CHECKING

from jaxdist._late import open_late as _open_late

if TYPE_CHECKING:
    from jaxdist._parameter_server import ClusterCoordinator as ClusterCoordinator
    from jaxdist._parameter_server import PerWorkerValues as PerWorkerValues
    from jaxdist._parameter_server import RemoteValue as RemoteValue

_open_late(__name__)
