"""Helpers for tests and notebooks: virtual devices, and several processes.

No other room of jaxdist uses this one.
"""

from jaxdist._devices import virtual_devices as virtual_devices
from jaxdist.testing._launch import launch as launch
