"""All-reduce algorithms: functions of a vector and of the groups of replicas that communicate."""

from jaxdist._collectives.algorithms.algorithm import Algorithm as Algorithm
from jaxdist._collectives.algorithms.by_cost import Auto as Auto
from jaxdist._collectives.algorithms.by_cost import find_worker_size as find_worker_size
from jaxdist._collectives.algorithms.by_cost import make_auto as make_auto
from jaxdist._collectives.algorithms.by_name import NAMES as NAMES
from jaxdist._collectives.algorithms.by_name import check_name as check_name
from jaxdist._collectives.algorithms.by_name import make_algorithm as make_algorithm
from jaxdist._collectives.algorithms.halving_doubling import HalvingDoubling as HalvingDoubling
from jaxdist._collectives.algorithms.host import Host as Host
from jaxdist._collectives.algorithms.one_device import OneDevice as OneDevice
from jaxdist._collectives.algorithms.replica_groups import ReplicaGroups as ReplicaGroups
from jaxdist._collectives.algorithms.replica_groups import group_all as group_all
from jaxdist._collectives.algorithms.replica_groups import split as split
from jaxdist._collectives.algorithms.ring import Ring as Ring
from jaxdist._collectives.algorithms.two_level import TwoLevel as TwoLevel
from jaxdist._collectives.algorithms.xla import Xla as Xla
from jaxdist._collectives.algorithms.xla import hide_complex_constant as hide_complex_constant
