"""`OneDeviceStrategy`: one replica on one device."""

from typing import Any, final

import jax

from jaxdist import _mesh
from jaxdist._called import called
from jaxdist._collectives import read_communication
from jaxdist._devices import runtime
from jaxdist._strategies.base import Strategy
from jaxdist._strategies.deterministic import add_virtual_replicas
from jaxdist._strategies.over_processes.one_process import check_one_process


@final
class OneDeviceStrategy(Strategy):
    """One replica on one device: the reference for the same code on many devices.

    In a job of several processes, each process has its own strategy, which is logged.

    Args:
        device: `"cpu:0"`, `"GPU:1"`, a full documented name, or a `jax.Device`.
        options: Communication options. One replica communicates nothing, so they have no effect,
            which is logged.
        experimental_hints: The older name of `options`.
        deterministic: As for `MirroredStrategy`: this device runs the virtual replicas one after
            the other, and gives the bits of a `MirroredStrategy` with the same number of them.

    Raises:
        DeviceError: No such device.
        SeveralProcessesError: A device of another process.
        ArgumentError: The number of virtual replicas is not a power of two.

    Example:
        >>> strategy = OneDeviceStrategy("cpu:1")
        >>> strategy.run(lambda x: x + 1, (np.float32(1),)).devices() == {jax.devices()[1]}
        True

    Source:
        `tf.distribute.OneDeviceStrategy`.
    """

    @called("OneDeviceStrategy")
    def __init__(
        self,
        device: str | jax.Device,
        *,
        options: Any = None,
        experimental_hints: Any = None,
        deterministic: bool | int = False,
    ) -> None:
        layout = _mesh.build([runtime.device_from_name(device, "OneDeviceStrategy(device=...)")])
        check_one_process(layout, were_chosen=True)
        layout = add_virtual_replicas(layout, deterministic)
        self._set_up(layout, read_communication(None, options, experimental_hints))

    # With virtual replicas the device has several replicas, so values stay `PerReplica`.
    @property
    def _unwraps(self) -> bool:
        return self.layout.num_virtual is None
