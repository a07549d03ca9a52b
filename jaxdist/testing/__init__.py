"""Things for tests and notebooks: virtual devices.

Nothing in jaxdist itself uses this room.
"""

from jaxdist.testing._virtual_devices import virtual_devices as virtual_devices
