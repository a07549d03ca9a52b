"""What a distributed value is."""

from jaxdist.values._distributed import DistributedValues as DistributedValues
from jaxdist.values._indexed_slices import IndexedSlices as IndexedSlices
from jaxdist.values._per_replica import Form as Form
from jaxdist.values._per_replica import PerReplica as PerReplica
from jaxdist.values._per_replica import shards_by_replica as shards_by_replica
from jaxdist.values._placement import Kind as Kind
from jaxdist.values._placement import Placement as Placement
from jaxdist.values._placement import checked_global as checked_global
from jaxdist.values._placement import checked_per_replica as checked_per_replica
from jaxdist.values._placement import placement_of as placement_of
from jaxdist.values._placement import placement_of_sharding as placement_of_sharding
from jaxdist.values._variable import Variable as Variable
from jaxdist.values._variable import any_variable as any_variable
from jaxdist.values._variable import held_by as held_by
from jaxdist.values._variable import hold_all as hold_all
from jaxdist.values._variable_access import Change as Change
from jaxdist.values._variable_access import Site as Site
from jaxdist.values._variable_access import find_sites_with as find_sites_with
from jaxdist.values._variable_across import check_can_combine as check_can_combine
from jaxdist.values._variable_across import no_sum_of_all as no_sum_of_all
from jaxdist.values._variable_checks import checked_value as checked_value
from jaxdist.values._variable_enums import VariableAggregation as VariableAggregation
from jaxdist.values._variable_enums import VariableSynchronization as VariableSynchronization
from jaxdist.values._variable_scatter import Scatter as Scatter
from jaxdist.values._variable_scatter import check_can_scatter as check_can_scatter
