"""`CrossDeviceOps`: who reduces for a strategy, and how."""

from jaxdist.collectives.cross_device._algorithmic import AlgorithmicOps as AlgorithmicOps
from jaxdist.collectives.cross_device._all_reduce import (
    AllReduceCrossDeviceOps as AllReduceCrossDeviceOps,
)
from jaxdist.collectives.cross_device._base import CrossDeviceOps as CrossDeviceOps
from jaxdist.collectives.cross_device._base import checked_pairs as checked_pairs
from jaxdist.collectives.cross_device._collective import CollectiveAllReduce as CollectiveAllReduce
from jaxdist.collectives.cross_device._destinations import placed as placed
from jaxdist.collectives.cross_device._destinations import target_in_strategy as target_in_strategy
from jaxdist.collectives.cross_device._hierarchical import (
    HierarchicalCopyAllReduce as HierarchicalCopyAllReduce,
)
from jaxdist.collectives.cross_device._multi_worker import (
    MultiWorkerAllReduce as MultiWorkerAllReduce,
)
from jaxdist.collectives.cross_device._nccl import NcclAllReduce as NcclAllReduce
from jaxdist.collectives.cross_device._one_device import (
    ReductionToOneDevice as ReductionToOneDevice,
)
from jaxdist.collectives.cross_device._own_gather import gathered_by as gathered_by
from jaxdist.collectives.cross_device._own_gather import overrides as overrides
