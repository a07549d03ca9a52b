"""Things for tests and notebooks: virtual devices.

No room of jaxdist leans on it.
"""

from jaxdist.runtime import virtual_devices as virtual_devices
