"""Documented names under `tf.contrib.distribute`."""

from typing import TYPE_CHECKING

from jaxdist._late import open_late as _open_late
from jaxdist._not_there import explain_missing as _explain_missing

if TYPE_CHECKING:
    from jaxdist._collectives import AllReduceCrossDeviceOps as AllReduceCrossDeviceOps
    from jaxdist._collectives import CrossDeviceOps as CrossDeviceOps
    from jaxdist._collectives import MultiWorkerAllReduce as MultiWorkerAllReduce
    from jaxdist._collectives import ReductionToOneDevice
    from jaxdist._replica import ReplicaContext as ReplicaContext
    from jaxdist._strategies import OneDeviceStrategy as OneDeviceStrategy
    from jaxdist._strategies import Strategy, StrategyExtended
    from jaxdist._strategies import get_loss_reduction as get_loss_reduction
    from jaxdist._strategies import get_replica_context as get_replica_context
    from jaxdist._strategies import get_strategy as get_strategy
    from jaxdist._strategies import has_strategy as has_strategy
    from jaxdist._strategies import in_cross_replica_context as in_cross_replica_context
    from jaxdist.contrib._contexts import get_cross_replica_context as get_cross_replica_context
    from jaxdist.contrib._contexts import require_replica_context as require_replica_context
    from jaxdist.contrib._monitor import Monitor as Monitor
    from jaxdist.estimator import DistributeConfig as DistributeConfig
    from jaxdist.tpu.experimental import initialize_tpu_system as initialize_tpu_system

    # Older names in `tf.contrib.distribute`.
    DistributionStrategy = Strategy
    DistributionStrategyExtended = StrategyExtended
    ReductionToOneDeviceCrossDeviceOps = ReductionToOneDevice
    get_distribution_strategy = get_strategy
    has_distribution_strategy = has_strategy

_open_late(__name__)
_explain_missing(__name__)
