"""All-reduce algorithms: functions of a vector and of who communicates with whom."""

from jaxdist.collectives.algorithms._algorithm import Algorithm as Algorithm
from jaxdist.collectives.algorithms._auto import Auto as Auto
from jaxdist.collectives.algorithms._auto import auto as auto
from jaxdist.collectives.algorithms._auto import workers_of_equal_size as workers_of_equal_size
from jaxdist.collectives.algorithms._halving_doubling import HalvingDoubling as HalvingDoubling
from jaxdist.collectives.algorithms._host import Host as Host
from jaxdist.collectives.algorithms._level import Level as Level
from jaxdist.collectives.algorithms._level import split as split
from jaxdist.collectives.algorithms._level import whole as whole
from jaxdist.collectives.algorithms._named import NAMES as NAMES
from jaxdist.collectives.algorithms._named import check_name as check_name
from jaxdist.collectives.algorithms._named import named as named
from jaxdist.collectives.algorithms._one_device import OneDevice as OneDevice
from jaxdist.collectives.algorithms._ring import Ring as Ring
from jaxdist.collectives.algorithms._shards import InShards as InShards
from jaxdist.collectives.algorithms._two_level import TwoLevel as TwoLevel
from jaxdist.collectives.algorithms._xla import Xla as Xla
from jaxdist.collectives.algorithms._xla import opaque as opaque
