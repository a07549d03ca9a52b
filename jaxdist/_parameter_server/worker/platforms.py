"""The platforms of workers, and programs for them."""

from collections.abc import Sequence

import jax

from jaxdist._mesh import ReplicaMesh
from jaxdist.errors import ClusterError


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
