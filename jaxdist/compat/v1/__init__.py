"""Documented names under `tf.compat.v1.distribute`; module `tpu`: those of `tf.compat.v1.tpu`."""

from typing import TYPE_CHECKING

from jaxdist._late import open_late as _open_late
from jaxdist._not_there import explain_missing as _explain_missing

if TYPE_CHECKING:
    from jaxdist import cluster_resolver as cluster_resolver
    from jaxdist._collectives import CrossDeviceOps as CrossDeviceOps
    from jaxdist._collectives import HierarchicalCopyAllReduce as HierarchicalCopyAllReduce
    from jaxdist._collectives import NcclAllReduce as NcclAllReduce
    from jaxdist._collectives import ReduceOp as ReduceOp
    from jaxdist._collectives import ReductionToOneDevice as ReductionToOneDevice
    from jaxdist._parameter_server import Server as Server
    from jaxdist._program import RunOptions as RunOptions
    from jaxdist._replica import ReplicaContext as ReplicaContext
    from jaxdist._strategies import StrategyExtended as StrategyExtended
    from jaxdist._strategies import experimental_set_strategy as experimental_set_strategy
    from jaxdist._strategies import get_loss_reduction as get_loss_reduction
    from jaxdist._strategies import get_replica_context as get_replica_context
    from jaxdist._strategies import get_strategy as get_strategy
    from jaxdist._strategies import has_strategy as has_strategy
    from jaxdist._strategies import in_cross_replica_context as in_cross_replica_context
    from jaxdist.compat.v1 import experimental as experimental
    from jaxdist.compat.v1 import tpu as tpu
    from jaxdist.compat.v1._strategies import MirroredStrategy as MirroredStrategy
    from jaxdist.compat.v1._strategies import OneDeviceStrategy as OneDeviceStrategy
    from jaxdist.compat.v1._strategies import Strategy as Strategy
    from jaxdist.data import InputContext as InputContext
    from jaxdist.data import InputReplicationMode as InputReplicationMode

_open_late(__name__)
_explain_missing(__name__)
