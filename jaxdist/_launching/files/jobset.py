"""A JobSet of Kubernetes for the job of a command: one pod for each process."""

import os
import pathlib
import re
import shlex
import sys
from typing import Any

from jaxdist._launching.files.request import Request
from jaxdist._launching.files.text import write_yaml
from jaxdist.errors import LaunchError

_JOB = "workers"
_FOLDER = "/job"
_PORT = 8470  # of `KubernetesClusterResolver`
_MOST_BYTES = 1_000_000  # Kubernetes takes a MiB, with names and the rest
_ANNOTATIONS = {
    "JOBSET_NAME": "jobset.sigs.k8s.io/jobset-name",
    "REPLICATED_JOB_NAME": "jobset.sigs.k8s.io/replicatedjob-name",
    "JOB_INDEX": "jobset.sigs.k8s.io/job-index",
}


def make_jobset(request: Request) -> str:
    """Return the manifest, for `kubectl apply -f`.

    Without an image, the manifest holds the script or the configuration, and pip installs jaxdist.

    Raises:
        LaunchError: An option without use in Kubernetes, or a file that cannot be in a manifest.
    """
    request.refuse(
        "jobset",
        partition="Partitions belong to Slurm.\n\nLeave out --partition.",
        hosts=(
            "Each process is a pod, and Kubernetes chooses the machine of each pod.\n\n"
            "Leave out --hosts."
        ),
    )
    documents = [_make_jobset(request)]
    if request.image is None:
        documents.insert(0, _make_config_map(request))
    start = (
        f"# {request.count} processes of one job. Start it with: kubectl apply -f FILE\n"
        f"# Output: kubectl logs -f -l jobset.sigs.k8s.io/jobset-name={request.job_name} --prefix\n"
    )
    if request.image is None:
        start += (
            "# pip installs jaxdist in each pod. Files that the script reads or imports are not "
            "here;\n# an image of your own (--image) has them.\n"
        )
    return start + "---\n".join(write_yaml(document) for document in documents)


def _make_jobset(request: Request) -> dict[str, Any]:
    job: dict[str, Any] = {
        # The first pod that fails ends the Job; then the JobSet starts all pods again.
        "backoffLimit": 0,
        "completionMode": "Indexed",
        "completions": request.count,
        "parallelism": request.count,
    }
    if request.seconds is not None:
        job["activeDeadlineSeconds"] = request.seconds
    job["template"] = {"spec": _make_pod(request)}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": request.job_name},
        "spec": {
            "failurePolicy": {"maxRestarts": request.restarts},
            # Pods ask for each other's addresses while they start.
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "replicatedJobs": [{"name": _JOB, "replicas": 1, "template": {"spec": job}}],
        },
    }


def _make_pod(request: Request) -> dict[str, Any]:
    container: dict[str, Any] = {"name": "worker"}
    volumes: list[dict[str, Any]] = []
    mounts: list[dict[str, Any]] = []
    if request.image is None:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        install = shlex.join(["pip", "install", "--quiet", *request.requirements])
        container["image"] = f"python:{version}"
        # The script replaces the shell, so that it gets the signals.
        container["command"] = ["sh", "-c", f'{install} && exec python "$@"', "sh"]
        container["args"] = _move_file(request)
        volumes.append({"name": "job", "configMap": {"name": request.job_name}})
        mounts.append({"name": "job", "mountPath": _FOLDER})
    else:
        container["image"] = request.image
        container["command"] = ["python"]
        container["args"] = [_escape(argument) for argument in request.arguments]
    container["env"] = _list_variables(request)
    container["ports"] = [{"containerPort": _PORT}]
    amounts: dict[str, Any] = {}
    if request.cpus is not None:
        amounts["cpu"] = str(request.cpus)
    if request.memory is not None:
        amounts["memory"] = f"{request.memory}Gi"
    if request.gpu is not None:
        amounts["nvidia.com/gpu"] = str(request.devices_of_each)
        # NCCL needs more shared memory than the 64 MiB of a container.
        volumes.append({"name": "shared-memory", "emptyDir": {"medium": "Memory"}})
        mounts.append({"name": "shared-memory", "mountPath": "/dev/shm"})
    if amounts:
        container["resources"] = {"requests": amounts, "limits": dict(amounts)}
    if mounts:
        container["volumeMounts"] = mounts
    pod: dict[str, Any] = {"restartPolicy": "Never"}
    if request.gpu not in (None, "any"):
        pod["nodeSelector"] = {"nvidia.com/gpu.product": request.gpu}
    pod["containers"] = [container]
    if volumes:
        pod["volumes"] = volumes
    return pod


def _list_variables(request: Request) -> list[dict[str, Any]]:
    fixed = {
        "JAXDIST_CLUSTER": "kubernetes",
        "JAX_PROCESS_COUNT": str(request.count),
        "PROCESSES_IN_JOB": str(request.count),
        **request.list_variables(os.environ),
    }
    variables: list[dict[str, Any]] = [
        {"name": name, "value": _escape(value)} for name, value in fixed.items()
    ]
    for name, annotation in _ANNOTATIONS.items():
        path = f"metadata.annotations['{annotation}']"
        variables.append({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}})
    return variables


def _make_config_map(request: Request) -> dict[str, Any]:
    if request.file is None or pathlib.Path(request.file).is_dir():
        raise LaunchError(
            "jaxdist launch --print jobset was given no script, but "
            f"{shlex.join(request.arguments)}.\n\nWithout --image, the manifest holds the script "
            "itself, and a module or a folder is more than one file.\n\n"
            "Pass --image with an image that has it."
        )
    path = pathlib.Path(request.file)
    content = path.read_bytes()
    try:
        text = content.decode()
    except UnicodeDecodeError:
        text = ""
    if len(content) > _MOST_BYTES or (content and not text):
        raise LaunchError(
            f"jaxdist launch --print jobset was given {request.file!r}, which has {len(content)} "
            f"bytes{'' if text else ' and is not UTF-8'}.\n\nWithout --image, the manifest holds "
            f"the file as text of at most {_MOST_BYTES} bytes.\n\n"
            "Pass --image with an image that has the file."
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
    """Return the arguments, with the path at which a pod has the file."""
    moved = f"{_FOLDER}/{_make_key(request)}"
    arguments = [_escape(argument) for argument in request.arguments]
    # The script comes first. Another argument may have the same text.
    if request.file in request.arguments:
        arguments[list(request.arguments).index(request.file)] = moved
    return arguments


def _escape(text: str) -> str:
    """Return a text that Kubernetes leaves as it is: it replaces `$(NAME)`."""
    return text.replace("$(", "$$(")
