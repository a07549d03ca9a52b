"""Things for tests and notebooks: virtual devices.

No room of jaxdist leans on it.
"""

from jaxdist.testing._virtual_devices import virtual_devices as virtual_devices
