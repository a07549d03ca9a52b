"""What a distributed value is."""

from jaxdist.values._distributed import DistributedValues as DistributedValues
from jaxdist.values._per_replica import Form as Form
from jaxdist.values._per_replica import PerReplica as PerReplica
from jaxdist.values._placement import Kind as Kind
from jaxdist.values._placement import Placement as Placement
from jaxdist.values._placement import checked_global as checked_global
from jaxdist.values._placement import checked_per_replica as checked_per_replica
from jaxdist.values._placement import placement_of as placement_of
from jaxdist.values._placement import placement_of_sharding as placement_of_sharding
