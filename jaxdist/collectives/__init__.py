"""Combining values of replicas."""

from jaxdist.collectives._across import gather_across as gather_across
from jaxdist.collectives._across import reduce_across as reduce_across
from jaxdist.collectives._across import reduced_dims as reduced_dims
from jaxdist.collectives._across import settled as settled
from jaxdist.collectives._communication import Communication as Communication
from jaxdist.collectives._communication import communication_of as communication_of
from jaxdist.collectives._compressed_sum import CompressedSum as CompressedSum
from jaxdist.collectives._compressed_sum import Errors as Errors
from jaxdist.collectives._compression import compression_of as compression_of
from jaxdist.collectives._default_sum import default_summing as default_summing
from jaxdist.collectives._dtypes import check_numeric as check_numeric
from jaxdist.collectives._dtypes import result_dtype as result_dtype
from jaxdist.collectives._hints import hints_of as hints_of
from jaxdist.collectives._in_replica import all_gather as all_gather
from jaxdist.collectives._in_replica import all_reduce as all_reduce
from jaxdist.collectives._in_replica import gather_dim as gather_dim
from jaxdist.collectives._in_replica import gathered as gathered
from jaxdist.collectives._in_replica import summed as summed
from jaxdist.collectives._mark import ASSUME_REPLICATED as ASSUME_REPLICATED
from jaxdist.collectives._mark import assume_replicated as assume_replicated
from jaxdist.collectives._options import CollectiveHints as CollectiveHints
from jaxdist.collectives._options import (
    CommunicationImplementation as CommunicationImplementation,
)
from jaxdist.collectives._options import CommunicationOptions as CommunicationOptions
from jaxdist.collectives._packs import plan_packs as plan_packs
from jaxdist.collectives._plan import Plan as Plan
from jaxdist.collectives._reduce_op import ReduceOp as ReduceOp
from jaxdist.collectives._reduce_op import reduce_op as reduce_op
from jaxdist.collectives._reduction import ALL_REDUCE as ALL_REDUCE
from jaxdist.collectives._slices import all_reduce_slices as all_reduce_slices
from jaxdist.collectives._slices import all_reduce_tree as all_reduce_tree
from jaxdist.collectives._slices import is_slices as is_slices
from jaxdist.collectives._slices import reduce_slices_across as reduce_slices_across
from jaxdist.collectives._slices import slices_of_all as slices_of_all
from jaxdist.collectives._told import Told as Told
from jaxdist.collectives._told import note_ignored as note_ignored
from jaxdist.collectives._told import told as told
from jaxdist.collectives._trace_number import traced_anew as traced_anew
from jaxdist.collectives._trace_number import traced_once as traced_once
from jaxdist.collectives._tree import tree_reduced as tree_reduced
from jaxdist.collectives._uneven_gather import UNEVEN_ALL_GATHER as UNEVEN_ALL_GATHER
from jaxdist.collectives._uneven_gather import GatherLog as GatherLog
from jaxdist.collectives._uneven_gather import gather_padded as gather_padded
from jaxdist.collectives._uneven_gather import logged as logged
from jaxdist.collectives.cross_device import AlgorithmicOps as AlgorithmicOps
from jaxdist.collectives.cross_device import AllReduceCrossDeviceOps as AllReduceCrossDeviceOps
from jaxdist.collectives.cross_device import CollectiveAllReduce as CollectiveAllReduce
from jaxdist.collectives.cross_device import CrossDeviceOps as CrossDeviceOps
from jaxdist.collectives.cross_device import HierarchicalCopyAllReduce as HierarchicalCopyAllReduce
from jaxdist.collectives.cross_device import MultiWorkerAllReduce as MultiWorkerAllReduce
from jaxdist.collectives.cross_device import NcclAllReduce as NcclAllReduce
from jaxdist.collectives.cross_device import ReductionToOneDevice as ReductionToOneDevice
from jaxdist.collectives.cross_device import checked_pairs as checked_pairs
from jaxdist.collectives.cross_device import placed as placed
from jaxdist.collectives.cross_device import target_in_strategy as target_in_strategy
