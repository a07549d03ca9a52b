"""Collectives: all-reduce and all-gather of the values of replicas."""

from typing import TYPE_CHECKING

from jaxdist._late import open_late as _open_late

if TYPE_CHECKING:
    from jaxdist._collectives.across.gather import GATHER as GATHER
    from jaxdist._collectives.across.gather import check_gatherable as check_gatherable
    from jaxdist._collectives.across.kinds import Function as Function
    from jaxdist._collectives.across.kinds import Planned as Planned
    from jaxdist._collectives.across.kinds import Request as Request
    from jaxdist._collectives.across.kinds import ValueKind as ValueKind
    from jaxdist._collectives.across.kinds import check_count as check_count
    from jaxdist._collectives.across.kinds import find_kind as find_kind
    from jaxdist._collectives.across.kinds import join_slices as join_slices
    from jaxdist._collectives.across.kinds import refuse_slices as refuse_slices
    from jaxdist._collectives.across.kinds import refuse_sparse as refuse_sparse
    from jaxdist._collectives.across.plain import take_plain_array as take_plain_array
    from jaxdist._collectives.across.reduce import check_reducible as check_reducible
    from jaxdist._collectives.across.reduce import find_reduced_dims as find_reduced_dims
    from jaxdist._collectives.across.slices import REDUCE as REDUCE
    from jaxdist._collectives.across.slices import all_reduce_slices as all_reduce_slices
    from jaxdist._collectives.across.slices import all_reduce_tree as all_reduce_tree
    from jaxdist._collectives.across.slices import reduce_tree_of_one as reduce_tree_of_one
    from jaxdist._collectives.across.together import check_same_call as check_same_call
    from jaxdist._collectives.across.together import check_sum as check_sum
    from jaxdist._collectives.across.together import check_together as check_together
    from jaxdist._collectives.algorithms.one_level import (
        hide_complex_constant as hide_complex_constant,
    )
    from jaxdist._collectives.communication import Communication as Communication
    from jaxdist._collectives.communication import gather_by_ops as gather_by_ops
    from jaxdist._collectives.communication import has_override as has_override
    from jaxdist._collectives.communication import read_communication as read_communication
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
    from jaxdist._collectives.cross_device.multi_worker import (
        MultiWorkerAllReduce as MultiWorkerAllReduce,
    )
    from jaxdist._collectives.cross_device.one_device import (
        ReductionToOneDevice as ReductionToOneDevice,
    )
    from jaxdist._collectives.cross_device.values import local_shape as local_shape
    from jaxdist._collectives.cross_device.values import target_in_strategy as target_in_strategy
    from jaxdist._collectives.in_replica import all_gather as all_gather
    from jaxdist._collectives.in_replica import all_reduce as all_reduce
    from jaxdist._collectives.in_replica import check_results as check_results
    from jaxdist._collectives.in_replica import gather_dim as gather_dim
    from jaxdist._collectives.in_replica import gather_over_replicas as gather_over_replicas
    from jaxdist._collectives.in_replica import mean_over_replicas as mean_over_replicas
    from jaxdist._collectives.in_replica import sum_over_replicas as sum_over_replicas
    from jaxdist._collectives.marks import ALL_REDUCE as ALL_REDUCE
    from jaxdist._collectives.marks import ASSUME_REPLICATED as ASSUME_REPLICATED
    from jaxdist._collectives.marks import NO_PLAN as NO_PLAN
    from jaxdist._collectives.marks import REQUIRE_REPLICATED as REQUIRE_REPLICATED
    from jaxdist._collectives.marks import AllReducePlan as AllReducePlan
    from jaxdist._collectives.marks import TraceNotes as TraceNotes
    from jaxdist._collectives.marks import assume_replicated as assume_replicated
    from jaxdist._collectives.marks import collect_notes as collect_notes
    from jaxdist._collectives.marks import fresh_trace_key as fresh_trace_key
    from jaxdist._collectives.marks import make_mark as make_mark
    from jaxdist._collectives.marks import note_work as note_work
    from jaxdist._collectives.marks import require_replicated as require_replicated
    from jaxdist._collectives.marks import shared_trace_key as shared_trace_key
    from jaxdist._collectives.options import CollectiveHints as CollectiveHints
    from jaxdist._collectives.options import (
        CommunicationImplementation as CommunicationImplementation,
    )
    from jaxdist._collectives.options import CommunicationOptions as CommunicationOptions
    from jaxdist._collectives.options import read_options as read_options
    from jaxdist._collectives.reduction import ReduceOp as ReduceOp
    from jaxdist._collectives.reduction import check_numeric as check_numeric
    from jaxdist._collectives.reduction import check_supported as check_supported
    from jaxdist._collectives.reduction import finish_sum as finish_sum
    from jaxdist._collectives.reduction import is_below_a_byte as is_below_a_byte
    from jaxdist._collectives.reduction import prepare_summands as prepare_summands
    from jaxdist._collectives.reduction import reduce_op as reduce_op
    from jaxdist._collectives.reduction import result_dtype as result_dtype
    from jaxdist._collectives.sums.compression import CompressedSum as CompressedSum
    from jaxdist._collectives.sums.compression import RoundingErrors as RoundingErrors
    from jaxdist._collectives.sums.compression import find_compression as find_compression
    from jaxdist._collectives.sums.default_sum import plan_default_sum as plan_default_sum
    from jaxdist._collectives.sums.default_sum import plan_packs as plan_packs
    from jaxdist._collectives.sums.tree import reduce_by_tree as reduce_by_tree
    from jaxdist._collectives.uneven_gather import UNEVEN_ALL_GATHER as UNEVEN_ALL_GATHER
    from jaxdist._collectives.uneven_gather import GatherLog as GatherLog
    from jaxdist._collectives.uneven_gather import current_log as current_log
    from jaxdist._collectives.uneven_gather import gather_padded as gather_padded
    from jaxdist._collectives.uneven_gather import note_averaged as note_averaged
    from jaxdist._collectives.uneven_gather import record_gathers as record_gathers
    from jaxdist._collectives.uneven_gather import trace_beside_step as trace_beside_step
    from jaxdist._collectives.uses import find_uses as find_uses
    from jaxdist._collectives.uses import walk_operations as walk_operations

_open_late(__name__)
