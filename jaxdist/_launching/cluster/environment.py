"""Makes the environment of each task of a cluster."""

import json
import os
import pathlib
import secrets
from collections.abc import Mapping, Sequence

from jaxdist._launching.environment import list_device_variables

# Variables that identify a process in other kinds of jobs.
_NOT_INHERITED = ("JAXDIST_CLUSTER", "JAXDIST_SERVICE", "JAXDIST_ADDRESSES")
# A task recognizes the other tasks of its run by this, also in files that they leave.
LAUNCH_ID = "JAXDIST_LAUNCH_ID"
# A worker that has done its part makes a file of this name in its folder; it may then end.
FINISHED = "finished"


def make_shared(inherited: Mapping[str, str], snapshots: pathlib.Path) -> dict[str, str]:
    """Return the environment that all tasks share.

    Args:
        inherited: The environment of the launcher.
        snapshots: Where parameter servers write their snapshots.
    """
    shared = {name: value for name, value in inherited.items() if name not in _NOT_INHERITED}
    if not (shared.get("JAXDIST_SECRET") or shared.get("JAXDIST_SECRET_FILE")):
        # Other users of this machine can also reach the ports.
        shared["JAXDIST_SECRET"] = secrets.token_urlsafe()
    shared["JAXDIST_SNAPSHOT_DIRECTORY"] = str(snapshots)
    shared[LAUNCH_ID] = secrets.token_hex(8)
    shared.setdefault("PYTHONUNBUFFERED", "1")
    return shared


def describe_joining(
    inherited: Mapping[str, str], cluster: Mapping[str, Sequence[str]], address: str
) -> str:
    """Return how a worker that starts later joins; empty if it cannot know the secret.

    Args:
        inherited: The environment of the launcher.
        cluster: The addresses of all tasks.
        address: A free address for the worker.
    """
    if not (inherited.get("JAXDIST_SECRET") or inherited.get("JAXDIST_SECRET_FILE")):
        return ""
    index = len(cluster["worker"])
    config = {
        "cluster": {"ps": list(cluster["ps"]), "worker": {str(index): address}},
        "task": {"type": "worker", "index": index},
    }
    return f"another worker joins with JAXDIST_ANNOUNCE=1 TF_CONFIG='{json.dumps(config)}'"


def make_task_environment(
    shared: Mapping[str, str],
    cluster: Mapping[str, Sequence[str]],
    name: str,
    index: int,
    devices: int | None,
) -> dict[str, str]:
    """Return the environment of one task.

    Args:
        shared: The environment that all tasks share.
        cluster: The addresses of all tasks.
        name: The job of the task.
        index: Its number.
        devices: Number of CPU devices of a worker; None if workers have GPUs.
    """
    config = {"cluster": dict(cluster), "task": {"type": name, "index": index}}
    environment = {**shared, "TF_CONFIG": json.dumps(config)}
    if devices is None:
        # Only the workers use the GPUs and their memory.
        return environment if name == "worker" else {**environment, "JAX_PLATFORMS": "cpu"}
    count = devices if name == "worker" else 1
    return environment | list_device_variables(count, os.environ)
