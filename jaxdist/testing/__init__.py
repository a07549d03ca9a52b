"""Helpers for tests and notebooks: virtual devices.

No other room of jaxdist uses this one.
"""

from jaxdist._devices import virtual_devices as virtual_devices
