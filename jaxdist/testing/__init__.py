"""Things for tests and notebooks: virtual devices.

No room of jaxdist leans on it.
"""

from jaxdist._devices import virtual_devices as virtual_devices
