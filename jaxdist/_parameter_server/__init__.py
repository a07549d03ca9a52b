"""Asynchronous training: variables on servers, and workers that are not in step."""

from jaxdist._parameter_server import rpc as rpc
from jaxdist._parameter_server.variables import FixedShardsPartitioner as FixedShardsPartitioner
from jaxdist._parameter_server.variables import MaxSizePartitioner as MaxSizePartitioner
from jaxdist._parameter_server.variables import MinSizePartitioner as MinSizePartitioner
from jaxdist._parameter_server.variables import Partitioner as Partitioner
from jaxdist._parameter_server.variables import ShardedVariable as ShardedVariable
