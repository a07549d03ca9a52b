"""TPU topologies, device assignments and systems."""

from typing import TYPE_CHECKING

from jaxdist._late import open_late as _open_late

if TYPE_CHECKING:
    from jaxdist.tpu import experimental as experimental
    from jaxdist.tpu._device_assignment import SINGLE_CORE_ASSIGNMENT as SINGLE_CORE_ASSIGNMENT
    from jaxdist.tpu._initialize import system_of as system_of
    from jaxdist.tpu._options import XLAOptions as XLAOptions
    from jaxdist.tpu._order import is_reordered as is_reordered
    from jaxdist.tpu._order import order_cores as order_cores
    from jaxdist.tpu._slice import Slice as Slice
    from jaxdist.tpu._slice import slice_of as slice_of
    from jaxdist.tpu._slice import topology_of as topology_of
    from jaxdist.tpu._system import TPUSystem as TPUSystem
    from jaxdist.tpu._topology import AXES as AXES
    from jaxdist.tpu._topology import topology_of_bytes as topology_of_bytes

_open_late(__name__)
