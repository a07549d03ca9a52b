"""Finds devices for rooms that do not import JAX: TPUs of this machine, CPUs, described slices."""

import contextlib
import glob
import importlib.metadata
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from jaxdist.errors import MissingExtraError

# Without these, libtpu waits for a metadata server, which exists only on Google Cloud.
_COMPILE_ONLY = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    # A description uses no chip, so another process may use libtpu at the same time.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


class NotDescribedError(Exception):
    """Raised when libtpu cannot describe a slice; `tpu` turns it into a public error."""

    def __init__(self, message: str, version: str) -> None:
        super().__init__(message)
        self.version = version


def cpus() -> list[jax.Device]:
    """Return the CPU devices of this process, sorted by id."""
    try:
        return sorted(jax.local_devices(backend="cpu"), key=lambda d: d.id)
    except RuntimeError:
        return []


def tpus() -> tuple[list[Any], str]:
    """Return all TPU devices of the job, and JAX's message if there are none."""
    try:
        return list(jax.devices("tpu")), ""
    except RuntimeError as error:
        return [], str(error).splitlines()[0]


def describe_search() -> str:
    """Describe in a sentence why JAX finds a TPU on this machine, or none."""
    version = _libtpu_version()
    libtpu = f"libtpu {version} is installed" if version else "libtpu is not installed"
    chips = chips_of_this_machine()
    device = f"{chips[0]} exists" if chips else "there is no /dev/accel0 or /dev/vfio/0"
    names = ("JAX_PLATFORMS", "TPU_NAME", "TPU_WORKER_HOSTNAMES", "TPU_ACCELERATOR_TYPE")
    variables = (
        ", ".join(f"{n}={os.environ[n]!r}" for n in names if n in os.environ)
        or "no variable for a TPU"
    )
    return f"On this machine {libtpu}, {device}, and the environment has {variables}."


def describe_slice(
    name: str, num_slices: int, wrap: tuple[bool, bool, bool] = (False, False, False)
) -> list[Any]:
    """Return the devices of a slice that libtpu describes: for compiling, not for running.

    Args:
        name: libtpu's name of the slice.
        num_slices: The number of such slices.
        wrap: Whether the last chip in x, y and z has a link to the first one. The compiler uses
            this to choose the algorithms of collectives.

    Raises:
        MissingExtraError: libtpu is not installed.
        NotDescribedError: libtpu does not know the slice.
    """
    version = _libtpu_version()
    if version is None:
        raise MissingExtraError(
            f"{name!r} cannot be described: libtpu is not installed.\n\n"
            "libtpu describes slices of TPUs, and needs no TPU for that.\n\n"
            "Install it: pip install libtpu."
        )
    # Imported late: few programs need this module, and importing it takes time.
    from jax.experimental import topologies

    more = {"num_slices": num_slices} if num_slices > 1 else {}
    with set_environment(_COMPILE_ONLY):
        try:
            found = topologies.get_topology_desc(
                platform="tpu", topology_name=name, wrap=wrap, **more
            )
        except RuntimeError as error:
            raise NotDescribedError(str(error).splitlines()[0], version) from None
    return list(found.devices)


def accelerators(process: int | None) -> dict[str, int]:
    """Count the accelerators of each kind, of one process or (None) of the whole job."""
    counts: dict[str, int] = {}
    for device in jax.devices():
        if device.platform != "cpu" and process in (None, device.process_index):
            kind = "TPU" if device.platform == "tpu" else "GPU"
            counts[kind] = counts.get(kind, 0) + 1
    return counts


def chips_of_this_machine() -> list[str]:
    """List the device files of TPU chips."""
    # Older TPUs appear as /dev/accel0, newer ones as /dev/vfio/0.
    return sorted(glob.glob("/dev/accel[0-9]*") + glob.glob("/dev/vfio/[0-9]*"))


def clear_caches() -> None:
    """Drop all compiled programs."""
    jax.clear_caches()


def _libtpu_version() -> str | None:
    try:
        return importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        return None


@contextlib.contextmanager
def set_environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables inside the block, except those that are already set."""
    added = [name for name in values if name not in os.environ]
    os.environ.update({name: values[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def has_loaded_libtpu() -> bool:
    """Whether this process has loaded libtpu, the library for TPUs.

    JAX imports its package early, but loads the library with the first array. After that, on a
    machine without a TPU, a call of JAX's profiler ends the process with a signal.
    """
    maps = pathlib.Path("/proc/self/maps")
    return maps.exists() and "libtpu.so" in maps.read_text()
