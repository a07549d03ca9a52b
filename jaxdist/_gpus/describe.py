"""Makes devices of GPUs that this machine does not have: for compiling, not for running."""

import functools
import importlib.metadata
import importlib.util
import os
import pathlib
import shutil
import sys
import threading
from collections.abc import Iterable
from typing import Any, cast

import jax

from jaxdist import _compat
from jaxdist._devices import chips
from jaxdist._first_import import hide_driver_lines
from jaxdist._gpus.cluster import DESCRIBED, GpuCluster
from jaxdist._validate import cuda_plan_command
from jaxdist.cost import Target
from jaxdist.errors import DeviceError, MissingExtraError

_LOCK = threading.Lock()
# The description of each device, so that jaxdist recognizes a mesh that cannot run programs.
_NAMES: dict[Any, str] = {}


def describe_gpus(cluster: GpuCluster) -> list[Any]:
    """Return the devices of a cluster, domain by domain and host by host.

    Cost:
        One second for the first description of a process. Equal clusters get the same devices.

    Raises:
        MissingExtraError: JAX's CUDA plugin or ptxas is not installed.
        DeviceError: The plugin's version differs from JAX's, or it refuses the description.
    """
    # Without the lock, two threads could register the plugin twice.
    with _LOCK:
        return list(_describe(cluster))


def find_description(devices: Iterable[Any]) -> str | None:
    """Return the name of the description to which one of the devices belongs, or None."""
    return next((_NAMES[d] for d in devices if d in _NAMES), None)


@functools.cache
def _describe(cluster: GpuCluster) -> tuple[Any, ...]:
    # Every GPU of the table has a target.
    target = cast(Target, cluster.chip.target)
    plugin = _check_plugin(cluster)
    cuda = 13 if plugin.endswith("13") else 12
    try:
        with chips.set_environment(_compat.SKIP_CUDA_CHECKS), hide_driver_lines():
            devices = _compat.make_gpu_devices(plugin, target.to_text(cuda), cluster.topology)
    except (RuntimeError, NotImplementedError) as error:
        raise DeviceError(
            f"JAX's plugin {plugin} does not describe {cluster.name!r}. It reported: "
            f"{str(error).splitlines()[0]}\n\n"
            "The plugin makes devices to compile for, and needs no GPU for that.\n\n"
            f"Install the plugin of this JAX again: {cuda_plan_command()}"
        ) from error
    _NAMES.update(dict.fromkeys(devices, DESCRIBED + cluster.name))
    return tuple(devices)


def _check_plugin(cluster: GpuCluster) -> str:
    """Check that the plugin can compile, and return its name."""
    plugin = _compat.find_cuda_plugin()
    if plugin is None:
        raise _make_missing_error(cluster, "JAX's CUDA plugin is not installed")
    package = f"jax-{plugin.removeprefix('xla_')}-plugin"
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        version = jax.__version__  # built from source
    if version != jax.__version__:
        raise DeviceError(
            f"{cluster.name!r} cannot be described: {package} is {version}, and JAX is "
            f"{jax.__version__}.\n\nA plugin works with the JAX of the same version.\n\n"
            f"Install that of this JAX: {cuda_plan_command(jax.__version__)}"
        )
    if not _has_ptxas():
        raise _make_missing_error(cluster, "the assembler ptxas is not installed")
    return plugin


def _make_missing_error(cluster: GpuCluster, what: str) -> MissingExtraError:
    return MissingExtraError(
        f"{cluster.name!r} cannot be described: {what}.\n\n"
        "XLA's compiler for GPUs is in JAX's CUDA plugin, and calls ptxas. They need no GPU, no "
        "driver and no CUDA.\n\n"
        f"Install them for Python {sys.version_info[0]}.{sys.version_info[1]}: "
        f"{cuda_plan_command()}"
    )


def _has_ptxas() -> bool:
    """Whether XLA will find `ptxas`: in NVIDIA's packages, in a CUDA installation, or on PATH."""
    if shutil.which("ptxas"):
        return True
    roots = [os.environ.get("CUDA_HOME", ""), os.environ.get("CUDA_PATH", ""), "/usr/local/cuda"]
    found = importlib.util.find_spec("nvidia")
    packages = list(found.submodule_search_locations or []) if found else []
    candidates = [pathlib.Path(root) / "bin" / "ptxas" for root in roots if root]
    candidates += [p for top in packages for p in pathlib.Path(top).glob("*/bin/ptxas")]
    return any(p.is_file() for p in candidates)
