"""One replica on one device."""

from typing import final

import jax

from jaxdist import mesh, runtime
from jaxdist.strategies._base import Strategy


@final
class OneDeviceStrategy(Strategy):
    """One replica on one device: the same code as on many, and the oracle for it.

    Args:
        device: `"cpu:0"`, `"GPU:1"`, a full documented name, or a `jax.Device`.

    Raises:
        DeviceError: No such device.

    Example:
        >>> strategy = OneDeviceStrategy("cpu:1")
        >>> strategy.run(lambda x: x + 1, (np.float32(1),)).devices() == {jax.devices()[1]}
        True

    Source:
        `tf.distribute.OneDeviceStrategy`.
    """

    _unwraps = True

    def __init__(self, device: str | jax.Device) -> None:
        self._set_up(mesh.build([runtime.device_from_name(device)]))
