"""Asynchronous training: variables on servers, and workers that are not in step."""

from typing import TYPE_CHECKING

from jaxdist._late import open_late as _open_late

if TYPE_CHECKING:
    from jaxdist._parameter_server import rpc as rpc
    from jaxdist._parameter_server.closures import ServerOptimizer as ServerOptimizer
    from jaxdist._parameter_server.closures import apply_updates as apply_updates
    from jaxdist._parameter_server.closures import cut_update as cut_update
    from jaxdist._parameter_server.coordinator import ClusterCoordinator as ClusterCoordinator
    from jaxdist._parameter_server.coordinator import PerWorkerDataset as PerWorkerDataset
    from jaxdist._parameter_server.coordinator import PerWorkerIterator as PerWorkerIterator
    from jaxdist._parameter_server.coordinator import PerWorkerValues as PerWorkerValues
    from jaxdist._parameter_server.coordinator import RemoteValue as RemoteValue
    from jaxdist._parameter_server.coordinator import Statistics as Statistics
    from jaxdist._parameter_server.coordinator import (
        experimental_get_current_worker_index as experimental_get_current_worker_index,
    )
    from jaxdist._parameter_server.protocol import Change as Change
    from jaxdist._parameter_server.protocol import Read as Read
    from jaxdist._parameter_server.strategy import (
        ParameterServerStrategy as ParameterServerStrategy,
    )
    from jaxdist._parameter_server.strategy import WorkerStrategy as WorkerStrategy
    from jaxdist._parameter_server.tasks import Server as Server
    from jaxdist._parameter_server.tasks import ServerDef as ServerDef
    from jaxdist._parameter_server.variables import FixedShardsPartitioner as FixedShardsPartitioner
    from jaxdist._parameter_server.variables import MaxSizePartitioner as MaxSizePartitioner
    from jaxdist._parameter_server.variables import MinSizePartitioner as MinSizePartitioner
    from jaxdist._parameter_server.variables import Partitioner as Partitioner
    from jaxdist._parameter_server.variables import ShardedVariable as ShardedVariable
    from jaxdist._parameter_server.variables import list_shards as list_shards

_open_late(__name__)
