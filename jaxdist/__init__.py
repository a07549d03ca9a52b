"""The programming model of `tf.distribute`, on JAX."""

from typing import TYPE_CHECKING

from jaxdist import _first_import as _first_import
from jaxdist._late import open_late as _open_late
from jaxdist._not_there import explain_missing as _explain_missing

if TYPE_CHECKING:
    from jaxdist import cluster_resolver as cluster_resolver
    from jaxdist import compat as compat
    from jaxdist import config as config
    from jaxdist import contrib as contrib
    from jaxdist import coordinator as coordinator
    from jaxdist import errors as errors
    from jaxdist import estimator as estimator
    from jaxdist import experimental as experimental
    from jaxdist import fit as fit
    from jaxdist import nn as nn
    from jaxdist import partition as partition
    from jaxdist import testing as testing
    from jaxdist import tpu as tpu
    from jaxdist._collectives import CrossDeviceOps as CrossDeviceOps
    from jaxdist._collectives import HierarchicalCopyAllReduce as HierarchicalCopyAllReduce
    from jaxdist._collectives import NcclAllReduce as NcclAllReduce
    from jaxdist._collectives import ReduceOp as ReduceOp
    from jaxdist._collectives import ReductionToOneDevice as ReductionToOneDevice
    from jaxdist._collectives import assume_replicated as assume_replicated
    from jaxdist._explain import explain as explain
    from jaxdist._parameter_server import ParameterServerStrategy as ParameterServerStrategy
    from jaxdist._parameter_server import Server as Server
    from jaxdist._program import Program as Program
    from jaxdist._program import RunOptions as RunOptions
    from jaxdist._program import function as function
    from jaxdist._replica import ReplicaContext as ReplicaContext
    from jaxdist._strategies import *  # noqa: F403 (a new strategy is listed there, once)
    from jaxdist._update import compressed_update as compressed_update
    from jaxdist._update import shard_state as shard_state
    from jaxdist._update import sharded_update as sharded_update
    from jaxdist._values import DistributedValues as DistributedValues
    from jaxdist._values import IndexedSlices as IndexedSlices
    from jaxdist._values import PerReplica as PerReplica
    from jaxdist._values import Sharded as Sharded
    from jaxdist._values import Variable as Variable
    from jaxdist._values import VariableAggregation as VariableAggregation
    from jaxdist._values import VariableSynchronization as VariableSynchronization
    from jaxdist.data import DistributedDataset as DistributedDataset
    from jaxdist.data import DistributedIterator as DistributedIterator
    from jaxdist.data import InputContext as InputContext
    from jaxdist.data import InputOptions as InputOptions
    from jaxdist.data import InputReplicationMode as InputReplicationMode
    from jaxdist.data import PartialBatch as PartialBatch
    from jaxdist.training import accumulate_gradients as accumulate_gradients
    from jaxdist.training import multi_step as multi_step

__version__ = "0.1.0"

_open_late(__name__)
_explain_missing(__name__)
