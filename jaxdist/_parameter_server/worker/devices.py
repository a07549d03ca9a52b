"""The devices of a worker, and the values of variables that it keeps on them."""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxdist._mesh import ReplicaMesh
from jaxdist._parameter_server.protocol import Values
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
        ClusterError: It is not one of them.
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


@dataclasses.dataclass
class _Kept:
    place: int
    incarnation: str
    version: int
    value: Any
    fence: int
    since: float


class KeptValues:
    """The values of variables that a worker keeps, on its devices.

    Args:
        put: Puts arrays on the devices.
    """

    def __init__(self, put: PutOn) -> None:
        self._put = put
        self._kept: dict[str, _Kept] = {}

    def is_fresh(self, name: str, fence: int, since: float) -> bool:
        """Whether a kept value came after the fence, and not before a time."""
        kept = self._kept.get(name)
        return kept is not None and kept.fence >= fence and kept.since >= since

    def get(self, name: str) -> Any:
        """Return the value of a variable that exists."""
        return self._kept[name].value

    def find_version(self, name: str) -> int | None:
        """Return the version of a value; None if it is not kept."""
        kept = self._kept.get(name)
        return None if kept is None else kept.version

    def get_incarnation(self, name: str) -> str:
        """Return the incarnation of the server to which the version of a value belongs."""
        return self._kept[name].incarnation

    def describe(self, names: Sequence[str]) -> dict[str, Any]:
        """Return the versions that a server needs not send again, as fields of `Read`."""
        kept = {n: self._kept[n] for n in names if n in self._kept}
        if not kept:
            return {}
        known = {name: k.version for name, k in kept.items()}
        return {"known": known, "incarnation": next(iter(kept.values())).incarnation}

    def keep(self, place: int, found: Values, fence: int) -> None:
        """Keep what a server has sent, and note that the other values are still those it has."""
        now = time.monotonic()
        # The kept values of a server have one incarnation: the versions of another one would be
        # those of other values.
        for name, kept in list(self._kept.items()):
            if kept.place == place and kept.incarnation != found.incarnation:
                del self._kept[name]
        # All at once: each call of `device_put` costs tens of microseconds.
        arrays = self._put.as_inputs(list(found.values.values()))
        values = dict(zip(found.values, arrays, strict=True))
        for name, version in found.versions.items():
            if name in values:
                value, incarnation = values[name], found.incarnation
                self._kept[name] = _Kept(place, incarnation, version, value, fence, now)
            else:
                kept = self._kept[name]
                kept.fence, kept.since = fence, now
