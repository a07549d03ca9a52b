"""Documented names under `tf.distribute.coordinator`, and the classes that its functions use."""

from typing import TYPE_CHECKING

from jaxdist._late import open_late as _open_late

if TYPE_CHECKING:
    from jaxdist._parameter_server import ClusterCoordinator as ClusterCoordinator
    from jaxdist._parameter_server import PerWorkerDataset as PerWorkerDataset
    from jaxdist._parameter_server import PerWorkerIterator as PerWorkerIterator
    from jaxdist._parameter_server import PerWorkerValues as PerWorkerValues
    from jaxdist._parameter_server import RemoteValue as RemoteValue
    from jaxdist._parameter_server import ServerOptimizer as ServerOptimizer
    from jaxdist._parameter_server import ShardedVariable as ShardedVariable
    from jaxdist._parameter_server import Statistics as Statistics
    from jaxdist._parameter_server import (
        experimental_get_current_worker_index as experimental_get_current_worker_index,
    )

    # The newer name of `PerWorkerValues`.
    PerWorkerValue = PerWorkerValues

_open_late(__name__)
