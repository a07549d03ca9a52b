"""Documented names under `tf.tpu.experimental`."""

from typing import TYPE_CHECKING

from jaxdist._late import open_late as _open_late
from jaxdist._not_there import explain_missing as _explain_missing

if TYPE_CHECKING:
    from jaxdist.tpu._device_assignment import DeviceAssignment as DeviceAssignment
    from jaxdist.tpu._initialize import initialize_tpu_system as initialize_tpu_system
    from jaxdist.tpu._initialize import shutdown_tpu_system as shutdown_tpu_system
    from jaxdist.tpu._options import DeviceOrderMode as DeviceOrderMode
    from jaxdist.tpu._system import HardwareFeature as HardwareFeature
    from jaxdist.tpu._system import TPUSystemMetadata as TPUSystemMetadata
    from jaxdist.tpu._topology import Topology as Topology

_open_late(__name__)
_explain_missing(__name__)
