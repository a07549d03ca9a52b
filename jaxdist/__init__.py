"""The programming model of `tf.distribute`, on JAX."""

from jaxdist import cluster_resolver as cluster_resolver
from jaxdist import compat as compat
from jaxdist import config as config
from jaxdist import contrib as contrib
from jaxdist import errors as errors
from jaxdist import experimental as experimental
from jaxdist import nn as nn
from jaxdist import partition as partition
from jaxdist import testing as testing
from jaxdist import tpu as tpu
from jaxdist._not_there import explain_missing as _explain_missing
from jaxdist.collectives import CrossDeviceOps as CrossDeviceOps
from jaxdist.collectives import HierarchicalCopyAllReduce as HierarchicalCopyAllReduce
from jaxdist.collectives import NcclAllReduce as NcclAllReduce
from jaxdist.collectives import ReduceOp as ReduceOp
from jaxdist.collectives import ReductionToOneDevice as ReductionToOneDevice
from jaxdist.collectives import assume_replicated as assume_replicated
from jaxdist.data import DistributedDataset as DistributedDataset
from jaxdist.data import DistributedIterator as DistributedIterator
from jaxdist.data import InputContext as InputContext
from jaxdist.data import InputOptions as InputOptions
from jaxdist.data import InputReplicationMode as InputReplicationMode
from jaxdist.data import PartialBatch as PartialBatch
from jaxdist.program import Program as Program
from jaxdist.program import RunOptions as RunOptions
from jaxdist.program import function as function
from jaxdist.replica import ReplicaContext as ReplicaContext
from jaxdist.strategies import GradientReport as GradientReport
from jaxdist.strategies import MirroredStrategy as MirroredStrategy
from jaxdist.strategies import OneDeviceStrategy as OneDeviceStrategy
from jaxdist.strategies import Strategy as Strategy
from jaxdist.strategies import StrategyExtended as StrategyExtended
from jaxdist.strategies import TPUStrategy as TPUStrategy
from jaxdist.strategies import check_replicas as check_replicas
from jaxdist.strategies import experimental_set_strategy as experimental_set_strategy
from jaxdist.strategies import get_replica_context as get_replica_context
from jaxdist.strategies import get_strategy as get_strategy
from jaxdist.strategies import has_strategy as has_strategy
from jaxdist.strategies import in_cross_replica_context as in_cross_replica_context
from jaxdist.training import accumulate_gradients as accumulate_gradients
from jaxdist.training import multi_step as multi_step
from jaxdist.update import compressed_update as compressed_update
from jaxdist.update import shard_state as shard_state
from jaxdist.update import sharded_update as sharded_update
from jaxdist.values import DistributedValues as DistributedValues
from jaxdist.values import IndexedSlices as IndexedSlices
from jaxdist.values import PerReplica as PerReplica
from jaxdist.values import Sharded as Sharded
from jaxdist.values import Variable as Variable
from jaxdist.values import VariableAggregation as VariableAggregation
from jaxdist.values import VariableSynchronization as VariableSynchronization

__version__ = "0.1.0"

_explain_missing(__name__)
