"""Helpers for tests and notebooks: virtual devices, and several processes.

No other room of jaxdist uses this one.
"""

from typing import TYPE_CHECKING

from jaxdist._late import open_late as _open_late

if TYPE_CHECKING:
    from jaxdist._devices import virtual_devices as virtual_devices
    from jaxdist.testing._launch import launch as launch

_open_late(__name__)
