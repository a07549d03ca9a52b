"""Asynchronous training: variables on servers, and workers that are not in step."""

from jaxdist._parameter_server import rpc as rpc
from jaxdist._parameter_server.coordinator import ClusterCoordinator as ClusterCoordinator
from jaxdist._parameter_server.coordinator import RemoteValue as RemoteValue
from jaxdist._parameter_server.strategy.parameter_server import (
    ParameterServerStrategy as ParameterServerStrategy,
)
from jaxdist._parameter_server.strategy.worker_strategy import WorkerStrategy as WorkerStrategy
from jaxdist._parameter_server.tasks import Server as Server
from jaxdist._parameter_server.tasks import ServerDef as ServerDef
from jaxdist._parameter_server.variables import FixedShardsPartitioner as FixedShardsPartitioner
from jaxdist._parameter_server.variables import MaxSizePartitioner as MaxSizePartitioner
from jaxdist._parameter_server.variables import MinSizePartitioner as MinSizePartitioner
from jaxdist._parameter_server.variables import Partitioner as Partitioner
from jaxdist._parameter_server.variables import ShardedVariable as ShardedVariable
