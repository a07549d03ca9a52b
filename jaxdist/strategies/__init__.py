"""The strategies, one class a file."""

from jaxdist.strategies._base import Strategy as Strategy
from jaxdist.strategies._current import check_replicas as check_replicas
from jaxdist.strategies._current import experimental_set_strategy as experimental_set_strategy
from jaxdist.strategies._current import get_replica_context as get_replica_context
from jaxdist.strategies._current import get_strategy as get_strategy
from jaxdist.strategies._current import has_strategy as has_strategy
from jaxdist.strategies._current import in_cross_replica_context as in_cross_replica_context
from jaxdist.strategies._extended import StrategyExtended as StrategyExtended
from jaxdist.strategies._gradient_report import GradientReport as GradientReport
from jaxdist.strategies._mirrored import MirroredStrategy as MirroredStrategy
from jaxdist.strategies._one_device import OneDeviceStrategy as OneDeviceStrategy
from jaxdist.strategies._tpu import TPUStrategy as TPUStrategy
from jaxdist.strategies._v1 import get_loss_reduction as get_loss_reduction
