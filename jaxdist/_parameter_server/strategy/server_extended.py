"""`ServerExtended`: the `extended` of a strategy whose variables are on servers."""

from jaxdist._mesh import ReplicaMesh
from jaxdist._strategies import StrategyExtended


class ServerExtended(StrategyExtended):
    """The `extended` of a `ParameterServerStrategy`.

    Source:
        `tf.distribute.StrategyExtended`.
    """

    __slots__ = ()

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """Names of the devices of one worker, without the worker: any may run a function."""
        layout: ReplicaMesh = self._strategy.layout
        return tuple(f"/device:{d.platform.upper()}:{n}" for n, d in enumerate(layout.devices))

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The device on which the coordinator reads variables, as in TensorFlow."""
        return ("/job:chief/replica:0/task:0/device:CPU:0",)
