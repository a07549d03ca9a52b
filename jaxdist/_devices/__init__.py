"""Finds JAX's devices by name and as TPU chips, and limits the steps in flight on them."""

from typing import TYPE_CHECKING

from jaxdist._late import open_late as _open_late

if TYPE_CHECKING:
    from jaxdist._devices import chips as chips
    from jaxdist._devices import runtime as runtime
    from jaxdist._devices.runtime import CPU_STEPS as CPU_STEPS
    from jaxdist._devices.runtime import device_name as device_name
    from jaxdist._devices.runtime import virtual_devices as virtual_devices

_open_late(__name__)
