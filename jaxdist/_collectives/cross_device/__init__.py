"""The `CrossDeviceOps` classes: how the values of replicas are reduced."""

from jaxdist._collectives.cross_device.algorithmic import AlgorithmicOps as AlgorithmicOps
from jaxdist._collectives.cross_device.all_reduce import (
    AllReduceCrossDeviceOps as AllReduceCrossDeviceOps,
)
from jaxdist._collectives.cross_device.all_reduce import (
    CollectiveAllReduce as CollectiveAllReduce,
)
from jaxdist._collectives.cross_device.all_reduce import (
    HierarchicalCopyAllReduce as HierarchicalCopyAllReduce,
)
from jaxdist._collectives.cross_device.all_reduce import NcclAllReduce as NcclAllReduce
from jaxdist._collectives.cross_device.base import CrossDeviceOps as CrossDeviceOps
from jaxdist._collectives.cross_device.base import check_pairs as check_pairs
from jaxdist._collectives.cross_device.destinations import put_on_target as put_on_target
from jaxdist._collectives.cross_device.destinations import target_in_strategy as target_in_strategy
from jaxdist._collectives.cross_device.multi_worker import (
    MultiWorkerAllReduce as MultiWorkerAllReduce,
)
from jaxdist._collectives.cross_device.one_device import (
    ReductionToOneDevice as ReductionToOneDevice,
)
from jaxdist._collectives.cross_device.own_gather import gather_by_ops as gather_by_ops
from jaxdist._collectives.cross_device.own_gather import has_override as has_override
from jaxdist._collectives.cross_device.values import local_shape as local_shape
