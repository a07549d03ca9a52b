"""The strategies, one class per file, and the functions that return the current one."""

from typing import TYPE_CHECKING

from jaxdist._late import open_late as _open_late

if TYPE_CHECKING:
    from jaxdist._checks import GradientReport as GradientReport
    from jaxdist._strategies.base import Strategy as Strategy
    from jaxdist._strategies.central_storage import (
        CentralStorageStrategy as CentralStorageStrategy,
    )
    from jaxdist._strategies.current import check_replicas as check_replicas
    from jaxdist._strategies.current import check_strategy as check_strategy
    from jaxdist._strategies.current import experimental_set_strategy as experimental_set_strategy
    from jaxdist._strategies.current import get_replica_context as get_replica_context
    from jaxdist._strategies.current import get_strategy as get_strategy
    from jaxdist._strategies.current import has_strategy as has_strategy
    from jaxdist._strategies.current import in_cross_replica_context as in_cross_replica_context
    from jaxdist._strategies.extended.extended import StrategyExtended as StrategyExtended
    from jaxdist._strategies.extended.strategy_v1 import get_loss_reduction as get_loss_reduction
    from jaxdist._strategies.mirrored import MirroredStrategy as MirroredStrategy
    from jaxdist._strategies.mirrored import OneDeviceStrategy as OneDeviceStrategy
    from jaxdist._strategies.multi_worker import (
        ExperimentalMultiWorkerMirroredStrategy as ExperimentalMultiWorkerMirroredStrategy,
    )
    from jaxdist._strategies.multi_worker import (
        MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
    )
    from jaxdist._strategies.multi_worker import (
        check_communication as check_communication,
    )
    from jaxdist._strategies.tpu import TPUStrategy as TPUStrategy
    from jaxdist._strategies.tpu import check_assignment as check_assignment

_open_late(__name__)
# The public names: `jaxdist` exports exactly these.
__all__ = [
    "GradientReport",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "Strategy",
    "StrategyExtended",
    "TPUStrategy",
    "check_replicas",
    "experimental_set_strategy",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
]
