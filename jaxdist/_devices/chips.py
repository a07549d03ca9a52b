"""JAX's devices for rooms that know none: TPUs of this machine, CPUs, and descriptions."""

import contextlib
import glob
import importlib.metadata
import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from jaxdist.errors import MissingExtraError

_LOG = logging.getLogger("jaxdist")

# Without these libtpu asks a metadata server that is not there, and waits for it.
_COMPILE_ONLY = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    # Descriptions take no chip, so another process may have libtpu open.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


class NotDescribedError(Exception):
    """libtpu refused a slice."""

    def __init__(self, message: str, version: str) -> None:
        super().__init__(message)
        self.version = version


def cpus() -> list[jax.Device]:
    """CPU devices of this process, by their number."""
    try:
        return sorted(jax.local_devices(backend="cpu"), key=lambda d: d.id)
    except RuntimeError:
        return []


def tpus() -> tuple[list[Any], str]:
    """All TPU devices of the job, and where there are none, what JAX said."""
    try:
        return list(jax.devices("tpu")), ""
    except RuntimeError as error:
        return [], str(error).splitlines()[0]


def where_it_looked(environ: Mapping[str, str] = os.environ) -> str:
    """What decides whether JAX sees a TPU, as sentences."""
    version = _libtpu_version()
    libtpu = f"libtpu {version} is installed" if version else "libtpu is not installed"
    chips = chips_of_this_machine()
    device = f"{chips[0]} exists" if chips else "there is no /dev/accel0 or /dev/vfio/0"
    names = ("JAX_PLATFORMS", "TPU_NAME", "TPU_WORKER_HOSTNAMES", "TPU_ACCELERATOR_TYPE")
    said = ", ".join(f"{n}={environ[n]!r}" for n in names if n in environ) or "nothing of a TPU"
    return f"On this machine {libtpu}, {device}, and the environment says {said}."


def described(name: str, num_slices: int) -> list[Any]:
    """Devices of a slice that libtpu describes; programs can be compiled for them, and not run.

    Raises:
        MissingExtraError: libtpu is not installed.
        NotDescribedError: libtpu knows no such slice.
    """
    version = _libtpu_version()
    if version is None:
        raise MissingExtraError(
            f"A description of {name!r} was asked for, and libtpu is not installed.\n\n"
            "libtpu describes slices of TPUs, and needs no TPU for that.\n\n"
            "Install it: pip install libtpu."
        )
    from jax.experimental import topologies

    more = {"num_slices": num_slices} if num_slices > 1 else {}
    with _environment(_COMPILE_ONLY):
        try:
            found = topologies.get_topology_desc(platform="tpu", topology_name=name, **more)
        except RuntimeError as error:
            raise NotDescribedError(str(error).splitlines()[0], version) from None
    return list(found.devices)


def accelerators(process: int | None) -> dict[str, int]:
    """Number of devices of each kind but CPU, of one process or of the whole job."""
    counts: dict[str, int] = {}
    for device in jax.devices():
        if device.platform != "cpu" and process in (None, device.process_index):
            kind = "TPU" if device.platform == "tpu" else "GPU"
            counts[kind] = counts.get(kind, 0) + 1
    return counts


def is_connected() -> bool:
    """Whether this process has joined the others of its job."""
    return jax.distributed.is_initialized()


def connect(**how: Any) -> None:
    """Join the other processes of the job; with no argument, those that JAX detects."""
    # The runtime would otherwise take SIGTERM for itself, and the process outlive it.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(**how)


def connect_where_detected(environ: Mapping[str, str] = os.environ) -> None:
    """Join the other hosts of a slice that only JAX's look at the metadata server can find.

    A machine without chips, or outside of Google Cloud, is alone, and nothing happens.
    """
    if not chips_of_this_machine() or "TPU_SKIP_MDS_QUERY" in environ:
        return
    try:
        connect()
    except (OSError, ValueError, RuntimeError) as error:
        # No metadata server, no other hosts, or devices were touched before: one host needs none.
        _LOG.info("No other hosts were joined: %s", str(error).split("\n")[0])


def chips_of_this_machine() -> list[str]:
    """Device files of TPU chips."""
    return sorted(glob.glob("/dev/accel[0-9]*") + glob.glob("/dev/vfio/[0-9]*"))


def clear_caches() -> None:
    """Forget compiled programs."""
    jax.clear_caches()


def _libtpu_version() -> str | None:
    try:
        return importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        return None


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Add variables that are not set for a while."""
    added = [name for name in values if name not in os.environ]
    os.environ.update({name: values[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
