"""Documented names under `tf.tpu.experimental`."""

from jaxdist._not_there import explain_missing as _explain_missing
from jaxdist.tpu._device_assignment import DeviceAssignment as DeviceAssignment
from jaxdist.tpu._hardware import HardwareFeature as HardwareFeature
from jaxdist.tpu._initialize import initialize_tpu_system as initialize_tpu_system
from jaxdist.tpu._initialize import shutdown_tpu_system as shutdown_tpu_system
from jaxdist.tpu._options import DeviceOrderMode as DeviceOrderMode
from jaxdist.tpu._system import TPUSystemMetadata as TPUSystemMetadata
from jaxdist.tpu._topology import Topology as Topology

_explain_missing(__name__)
