"""One replica on one device."""

from typing import final

import jax

from jaxdist import mesh, runtime
from jaxdist.strategies._base import Strategy
from jaxdist.strategies._deterministic import with_virtual_replicas


@final
class OneDeviceStrategy(Strategy):
    """One replica on one device: the same code as on many, and the oracle for it.

    Args:
        device: `"cpu:0"`, `"GPU:1"`, a full documented name, or a `jax.Device`.
        deterministic: As for `MirroredStrategy`: virtual replicas, which this device runs in turn,
            and the bits that a `MirroredStrategy` with as many of them gives.

    Raises:
        DeviceError: No such device.
        ArgumentError: A number of virtual replicas that is no power of two.

    Example:
        >>> strategy = OneDeviceStrategy("cpu:1")
        >>> strategy.run(lambda x: x + 1, (np.float32(1),)).devices() == {jax.devices()[1]}
        True

    Source:
        `tf.distribute.OneDeviceStrategy`.
    """

    def __init__(self, device: str | jax.Device, *, deterministic: bool | int = False) -> None:
        layout = mesh.build([runtime.device_from_name(device)])
        self._set_up(with_virtual_replicas("OneDeviceStrategy", layout, deterministic))

    @property
    def _unwraps(self) -> bool:
        return self.layout.num_virtual is None
