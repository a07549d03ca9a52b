"""Makes the environment of each process of a job on this machine."""

import json
import os
from collections.abc import Mapping, Sequence

from jaxdist._called import refuse
from jaxdist._launching.gpus import divide_gpus, list_gpus
from jaxdist.errors import LaunchError

FORCED = "--xla_force_host_platform_device_count"


def check_devices(devices: int | None, environment: Mapping[str, str]) -> None:
    """Raise if the number of devices is given both here and in XLA_FLAGS."""
    if devices is not None and FORCED in environment.get("XLA_FLAGS", ""):
        raise refuse(
            f"{devices} devices for each process, and XLA_FLAGS has {FORCED}.",
            "Only one of the two can decide how many CPU devices a process has.",
            f"Remove {FORCED} from XLA_FLAGS.",
            kind=LaunchError,
        )


def list_device_variables(devices: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for CPU devices of a process; none if XLA_FLAGS gives their number."""
    if FORCED in environment.get("XLA_FLAGS", ""):
        return {}
    # The second is JAX's own, for programs that use JAX without joining.
    return {"JAXDIST_DEVICES_PER_PROCESS": str(devices), "JAX_NUM_CPU_DEVICES": str(devices)}


def make_environments(
    places: Sequence[int],
    devices: int | None,
    ports: Sequence[int],
    service: str,
    attempt: int,
) -> list[dict[str, str]]:
    """Return the environment of each process.

    Args:
        places: The number of each process when the job began, which decides its GPUs.
        devices: Number of GPUs of each process, or of CPU devices without GPUs; None for one.
        ports: One for each process.
        service: Address of the coordination service.
        attempt: Number of the attempt, from 1.

    Raises:
        LaunchError: There are too few GPUs, or XLA_FLAGS also gives the number of devices.
    """
    check_devices(devices, os.environ)
    gpus = divide_gpus(max(places) + 1, devices or 1, os.environ, list_gpus)
    addresses = [f"127.0.0.1:{port}" for port in ports]
    return [
        make_environment(
            index,
            addresses,
            service,
            attempt,
            devices=None if gpus is not None else devices or 1,
            gpus=None if gpus is None else gpus[place],
        )
        for index, place in enumerate(places)
    ]


def make_environment(
    index: int,
    addresses: Sequence[str],
    service: str,
    attempt: int,
    *,
    devices: int | None,
    gpus: str | None = None,
) -> dict[str, str]:
    """Return the environment of one process.

    Args:
        index: Number of the process.
        addresses: The addresses of all processes.
        service: Address of the coordination service.
        attempt: Number of the attempt, from 1.
        devices: Number of CPU devices of the process; None if it has GPUs.
        gpus: Its `CUDA_VISIBLE_DEVICES`; None leaves the variable as it is.
    """
    config = {"cluster": {"worker": list(addresses)}, "task": {"type": "worker", "index": index}}
    own = {
        "TF_CONFIG": json.dumps(config),
        "JAXDIST_SERVICE": service,
        "JAXDIST_ATTEMPT": str(attempt),
        # Lines appear when they are printed, and are not lost when the process is killed.
        "PYTHONUNBUFFERED": os.environ.get("PYTHONUNBUFFERED", "1"),
    }
    if gpus is not None:
        own["CUDA_VISIBLE_DEVICES"] = gpus
    if devices is not None:
        own |= list_device_variables(devices, os.environ)
    # The processes find each other by TF_CONFIG, even if the launcher runs in a job of Slurm.
    inherited = {name: value for name, value in os.environ.items() if name != "JAXDIST_CLUSTER"}
    return {**inherited, **own}
