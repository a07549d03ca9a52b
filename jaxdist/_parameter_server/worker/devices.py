"""The devices of a worker: arrays on them, and programs for their platform."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxdist._mesh import ReplicaMesh
from jaxdist.errors import ClusterError

_OF_NUMPY = (np.ndarray, np.generic)


class PutOn:
    """Puts a list of arrays on the devices of a layout. With several, arrays are replicated."""

    def __init__(self, layout: ReplicaMesh) -> None:
        self._where = layout.first_device if layout.num_replicas == 1 else layout.replicated
        self._devices, self._mesh = layout.devices, layout.mesh
        self._is_one_cpu = len(layout.devices) == 1 and layout.first_device.platform == "cpu"

    def __call__(self, values: list[Any]) -> list[Any]:
        if len(self._devices) == 1:
            return jax.device_put(values, self._where)
        return [jax.device_put(x, self._find_place(x)) for x in values]

    def as_inputs(self, values: list[Any]) -> list[Any]:
        """Return arrays as a compiled program of the layout takes them."""
        # On a CPU the program takes the memory of aligned arrays of NumPy as it is. `device_put`
        # does so too, and costs the interpreter ten times as long.
        if self._is_one_cpu and all(isinstance(x, _OF_NUMPY) for x in values):
            return values
        return self(values)

    def _find_place(self, value: Any) -> Any:
        # The batch of all replicas is split over the devices already, perhaps over those of
        # another worker.
        sharding = getattr(value, "sharding", None)
        if isinstance(sharding, NamedSharding) and sharding.mesh.shape == self._mesh.shape:
            return NamedSharding(self._mesh, sharding.spec)
        return self._where


def find_platform(layout: ReplicaMesh) -> str:
    """Return the platform of some replicas, as `jax.export` names it: `cpu`, `cuda`, `tpu`, ..."""
    device = layout.first_device
    if device.platform != "gpu":
        return device.platform
    return "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"


def check_platform(name: str, platforms: Sequence[str], found: str) -> None:
    """Raise if a function is not compiled for the platform of this worker.

    Args:
        name: The name of the function.
        platforms: The platforms that it was exported for.
        found: The platform of this worker.

    Raises:
        ClusterError: It is none of them.
    """
    if found not in platforms:
        raise ClusterError(
            f"{name} was exported for {', '.join(platforms)}, and this worker runs on {found} "
            f"({jax.local_devices()[0].device_kind}).\n\n"
            "The coordinator exports a function for the platforms that the workers had when it was "
            "traced.\n\n"
            f"Start the worker again where it was, with JAX_PLATFORMS={platforms[0]}; or start "
            "the coordinator again."
        )
