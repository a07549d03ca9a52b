"""Variables as users of parameter servers see them, and how they are cut into shards."""

from jaxdist._parameter_server.variables.partitioners import (
    FixedShardsPartitioner as FixedShardsPartitioner,
)
from jaxdist._parameter_server.variables.partitioners import (
    MaxSizePartitioner as MaxSizePartitioner,
)
from jaxdist._parameter_server.variables.partitioners import (
    MinSizePartitioner as MinSizePartitioner,
)
from jaxdist._parameter_server.variables.partitioners import Partitioner as Partitioner
from jaxdist._parameter_server.variables.sharded import ShardedVariable as ShardedVariable
from jaxdist._parameter_server.variables.sharded import list_shards as list_shards
