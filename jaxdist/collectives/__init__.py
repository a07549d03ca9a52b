"""Combining values of replicas."""

from jaxdist.collectives._across import gather_across as gather_across
from jaxdist.collectives._across import reduce_across as reduce_across
from jaxdist.collectives._across import reduced_dims as reduced_dims
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
from jaxdist.collectives._reduce_op import ReduceOp as ReduceOp
from jaxdist.collectives._reduce_op import reduce_op as reduce_op
from jaxdist.collectives._require import REQUIRE_REPLICATED as REQUIRE_REPLICATED
from jaxdist.collectives._require import require_replicated as require_replicated
from jaxdist.collectives._sharded_across import gather_sharded as gather_sharded
from jaxdist.collectives._sharded_across import reduce_sharded as reduce_sharded
from jaxdist.collectives._slices import all_reduce_slices as all_reduce_slices
from jaxdist.collectives._slices import all_reduce_tree as all_reduce_tree
from jaxdist.collectives._slices import is_slices as is_slices
from jaxdist.collectives._slices import reduce_slices_across as reduce_slices_across
from jaxdist.collectives._slices import slices_of_all as slices_of_all
from jaxdist.collectives._trace_number import traced_anew as traced_anew
from jaxdist.collectives._trace_number import traced_once as traced_once
from jaxdist.collectives._uneven_gather import UNEVEN_ALL_GATHER as UNEVEN_ALL_GATHER
from jaxdist.collectives._uneven_gather import GatherLog as GatherLog
from jaxdist.collectives._uneven_gather import gather_padded as gather_padded
from jaxdist.collectives._uneven_gather import logged as logged
