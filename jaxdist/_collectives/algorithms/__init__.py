"""All-reduce algorithms: functions of a vector and of the groups of replicas that communicate."""

from jaxdist._collectives.algorithms.algorithm import Algorithm as Algorithm
from jaxdist._collectives.algorithms.by_cost import Auto as Auto
from jaxdist._collectives.algorithms.by_cost import auto as auto
from jaxdist._collectives.algorithms.by_cost import workers_of_equal_size as workers_of_equal_size
from jaxdist._collectives.algorithms.by_name import NAMES as NAMES
from jaxdist._collectives.algorithms.by_name import check_name as check_name
from jaxdist._collectives.algorithms.by_name import named as named
from jaxdist._collectives.algorithms.halving_doubling import HalvingDoubling as HalvingDoubling
from jaxdist._collectives.algorithms.host import Host as Host
from jaxdist._collectives.algorithms.one_device import OneDevice as OneDevice
from jaxdist._collectives.algorithms.replica_groups import ReplicaGroups as ReplicaGroups
from jaxdist._collectives.algorithms.replica_groups import split as split
from jaxdist._collectives.algorithms.replica_groups import whole as whole
from jaxdist._collectives.algorithms.ring import Ring as Ring
from jaxdist._collectives.algorithms.shards import InShards as InShards
from jaxdist._collectives.algorithms.two_level import TwoLevel as TwoLevel
from jaxdist._collectives.algorithms.xla import Xla as Xla
from jaxdist._collectives.algorithms.xla import opaque as opaque
