"""The `CrossDeviceOps` classes: how the values of replicas are reduced."""

from jaxdist._collectives.cross_device.algorithmic import AlgorithmicOps as AlgorithmicOps
from jaxdist._collectives.cross_device.all_reduce import (
    AllReduceCrossDeviceOps as AllReduceCrossDeviceOps,
)
from jaxdist._collectives.cross_device.base import CrossDeviceOps as CrossDeviceOps
from jaxdist._collectives.cross_device.base import checked_pairs as checked_pairs
from jaxdist._collectives.cross_device.destinations import placed as placed
from jaxdist._collectives.cross_device.destinations import target_in_strategy as target_in_strategy
from jaxdist._collectives.cross_device.hierarchical import (
    HierarchicalCopyAllReduce as HierarchicalCopyAllReduce,
)
from jaxdist._collectives.cross_device.multi_worker import (
    MultiWorkerAllReduce as MultiWorkerAllReduce,
)
from jaxdist._collectives.cross_device.one_device import (
    ReductionToOneDevice as ReductionToOneDevice,
)
from jaxdist._collectives.cross_device.own_gather import gathered_by as gathered_by
from jaxdist._collectives.cross_device.own_gather import overrides as overrides
from jaxdist._collectives.cross_device.xla_all_reduce import (
    CollectiveAllReduce as CollectiveAllReduce,
)
from jaxdist._collectives.cross_device.xla_all_reduce import NcclAllReduce as NcclAllReduce
