"""All-reduce algorithms: functions of a vector and of the groups of replicas that communicate."""

from jaxdist._collectives.algorithms.algorithm import Algorithm as Algorithm
from jaxdist._collectives.algorithms.algorithm import ReplicaGroups as ReplicaGroups
from jaxdist._collectives.algorithms.algorithm import group_all as group_all
from jaxdist._collectives.algorithms.algorithm import split as split
from jaxdist._collectives.algorithms.by_name import NAMES as NAMES
from jaxdist._collectives.algorithms.by_name import Auto as Auto
from jaxdist._collectives.algorithms.by_name import check_name as check_name
from jaxdist._collectives.algorithms.by_name import find_worker_size as find_worker_size
from jaxdist._collectives.algorithms.by_name import make_algorithm as make_algorithm
from jaxdist._collectives.algorithms.by_name import make_auto as make_auto
from jaxdist._collectives.algorithms.one_level import HalvingDoubling as HalvingDoubling
from jaxdist._collectives.algorithms.one_level import Host as Host
from jaxdist._collectives.algorithms.one_level import OneDevice as OneDevice
from jaxdist._collectives.algorithms.one_level import Ring as Ring
from jaxdist._collectives.algorithms.one_level import Xla as Xla
from jaxdist._collectives.algorithms.one_level import hide_complex_constant as hide_complex_constant
from jaxdist._collectives.algorithms.two_level import TwoLevel as TwoLevel
