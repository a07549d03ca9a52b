"""Makes the Kubernetes pod of one process, and the ConfigMap with its script."""

import pathlib
import re
import shlex
import sys
from collections.abc import Mapping
from typing import Any

from jaxdist._called import called, refuse
from jaxdist._launching.files.request import Request
from jaxdist.errors import LaunchError

PORT = 8470  # of `KubernetesClusterResolver`
_FOLDER = "/job"
_MOST_BYTES = 1_000_000  # Kubernetes takes 1 MiB, including names and metadata


def make_pod(
    request: Request,
    name: str,
    variables: list[dict[str, Any]],
    restart: str = "Never",
    volumes: Mapping[str, tuple[str, dict[str, Any]]] | None = None,
) -> dict[str, Any]:
    """Return the pod of one process.

    Args:
        request: What it runs and needs.
        name: Name of its container.
        variables: Its environment variables.
        restart: `Never`, or `OnFailure` if Kubernetes restarts only its container.
        volumes: For each name, where the volume is mounted, and its source.
    """
    container: dict[str, Any] = {"name": name}
    kept = [{"name": volume, **source} for volume, (_, source) in (volumes or {}).items()]
    mounts: list[dict[str, Any]] = [
        {"name": volume, "mountPath": path} for volume, (path, _) in (volumes or {}).items()
    ]
    if request.image is None:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        install = shlex.join(["pip", "install", "--quiet", *request.requirements])
        container["image"] = f"python:{version}"
        # The script replaces the shell, so that it gets the signals.
        container["command"] = ["sh", "-c", f'{install} && exec python "$@"', "sh"]
        container["args"] = _move_file(request)
        if request.file is not None:
            kept.append({"name": "job", "configMap": {"name": request.job_name}})
            mounts.append({"name": "job", "mountPath": _FOLDER})
    else:
        container["image"] = request.image
        container["command"] = ["python"]
        container["args"] = [escape(argument) for argument in request.arguments]
    container["env"] = variables
    container["ports"] = [{"containerPort": PORT}]
    amounts: dict[str, Any] = {}
    if request.cpus is not None:
        amounts["cpu"] = str(request.cpus)
    if request.memory is not None:
        amounts["memory"] = f"{request.memory}Gi"
    if request.gpu is not None:
        amounts["nvidia.com/gpu"] = str(request.devices_of_each)
        # NCCL needs more shared memory than the 64 MiB of a container.
        kept.append({"name": "shared-memory", "emptyDir": {"medium": "Memory"}})
        mounts.append({"name": "shared-memory", "mountPath": "/dev/shm"})
    if amounts:
        container["resources"] = {"requests": amounts, "limits": dict(amounts)}
    if mounts:
        container["volumeMounts"] = mounts
    pod: dict[str, Any] = {"restartPolicy": restart}
    if request.gpu not in (None, "any"):
        pod["nodeSelector"] = {"nvidia.com/gpu.product": request.gpu}
    pod["containers"] = [container]
    if kept:
        pod["volumes"] = kept
    return pod


@called("jaxdist launch --print jobset")
def make_config_map(request: Request) -> dict[str, Any]:
    """Return the ConfigMap that holds the script or the configuration.

    Raises:
        LaunchError: The job runs a module or a folder, or a manifest cannot hold the file.
    """
    if request.file is None or pathlib.Path(request.file).is_dir():
        raise refuse(
            f"{shlex.join(request.arguments)}, which is not a script.",
            "Without --image, the manifest holds the script itself, and a module or a folder is "
            "more than one file.",
            "Pass --image with an image that has it.",
            kind=LaunchError,
        )
    path = pathlib.Path(request.file)
    content = path.read_bytes()
    try:
        text = content.decode()
    except UnicodeDecodeError:
        text = ""
    if len(content) > _MOST_BYTES or (content and not text):
        raise refuse(
            f"{request.file!r}, which has {len(content)} bytes"
            f"{'' if text else ' and is not UTF-8'}.",
            f"Without --image, the manifest holds the file as text of at most {_MOST_BYTES} bytes.",
            "Pass --image with an image that has the file.",
            kind=LaunchError,
        )
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": request.job_name},
        "data": {_make_key(request): text},
    }


def _make_key(request: Request) -> str:
    name = pathlib.Path(request.file or "").name
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)


def _move_file(request: Request) -> list[str]:
    """Return the arguments, with the path that the file has in a pod."""
    moved = f"{_FOLDER}/{_make_key(request)}"
    arguments = [escape(argument) for argument in request.arguments]
    if request.file is not None:
        # Replace by position: another argument may be the same string.
        arguments[request.position] = moved
    return arguments


def escape(text: str) -> str:
    """Return a string in which Kubernetes replaces no `$(NAME)`."""
    return text.replace("$(", "$$(")
