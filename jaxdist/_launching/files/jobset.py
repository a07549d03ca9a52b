"""Writes a Kubernetes JobSet for the job of a command: one pod for each process."""

import dataclasses
import json
import os
import re
from typing import Any

from jaxdist._called import called, refuse
from jaxdist._launching.files.pod import PORT, escape, make_config_map, make_pod
from jaxdist._launching.files.request import Request, TaskRequest, write_yaml

_JOB = "workers"
_ANNOTATIONS = {
    "JOBSET_NAME": "jobset.sigs.k8s.io/jobset-name",
    "REPLICATED_JOB_NAME": "jobset.sigs.k8s.io/replicatedjob-name",
    "JOB_INDEX": "jobset.sigs.k8s.io/job-index",
}


def make_jobset(request: Request) -> str:
    """Return the manifest, for `kubectl apply -f`.

    Without an image, the manifest holds the script or the configuration, and pip installs jaxdist.

    Raises:
        LaunchError: An option has no use in Kubernetes, or a manifest cannot hold the file.
    """
    return _write_manifest(request, _make_jobset(request))


def _write_manifest(request: Request, jobset: dict[str, Any], comment: str = "") -> str:
    """Return the manifest of a JobSet, with the file that its pods need.

    Args:
        request: The job.
        jobset: The JobSet.
        comment: Further comment lines at the top, each with `#`.

    Raises:
        LaunchError: An option has no use in Kubernetes, or a manifest cannot hold the file.
    """
    request.refuse_options(
        "jobset",
        partition="Partitions belong to Slurm.\n\nLeave out --partition.",
        hosts=(
            "Each process is a pod, and Kubernetes chooses the machine of each pod.\n\n"
            "Leave out --hosts."
        ),
    )
    documents = [] if request.image is not None else [make_config_map(request)]
    documents.append(jobset)
    start = (
        f"# {request.count} processes of one job. Start it with: kubectl apply -f FILE\n"
        f"# Output: kubectl logs -f -l jobset.sigs.k8s.io/jobset-name={request.job_name} --prefix\n"
    )
    if request.image is None:
        start += (
            f"# pip installs {request.requirements[0]} in each pod; --install names another "
            "source.\n# Files that the script reads or imports are not here; an image of your own "
            "(--image) has them.\n"
        )
    return start + comment + "---\n".join(write_yaml(document) for document in documents)


def _make_jobset(request: Request) -> dict[str, Any]:
    # The first pod that fails ends the Job; then the JobSet starts all pods again.
    job = _make_indexed_job(request, 0, make_pod(request, "worker", _list_variables(request)))
    return _wrap_jobs(request, {_JOB: job}, {"failurePolicy": {"maxRestarts": request.restarts}})


def _make_indexed_job(request: Request, restarts: int, pod: dict[str, Any]) -> dict[str, Any]:
    job: dict[str, Any] = {
        "backoffLimit": restarts,
        "completionMode": "Indexed",
        "completions": request.count,
        "parallelism": request.count,
    }
    if request.seconds is not None:
        job["activeDeadlineSeconds"] = request.seconds
    job["template"] = {"spec": pod}
    return job


def _wrap_jobs(
    request: Request, jobs: dict[str, dict[str, Any]], policies: dict[str, Any]
) -> dict[str, Any]:
    """Return the JobSet with the given jobs, by name."""
    replicated = [
        {"name": name, "replicas": 1, "template": {"spec": job}} for name, job in jobs.items()
    ]
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": request.job_name},
        "spec": {
            **policies,
            # Pods look up each other's addresses while they start.
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "replicatedJobs": replicated,
        },
    }


def _list_variables(request: Request) -> list[dict[str, Any]]:
    fixed = {
        "JAXDIST_CLUSTER": "kubernetes",
        "JAX_PROCESS_COUNT": str(request.count),
        "PROCESSES_IN_JOB": str(request.count),
        **request.list_variables(os.environ),
    }
    variables: list[dict[str, Any]] = [
        {"name": name, "value": escape(value)} for name, value in fixed.items()
    ]
    for name, annotation in _ANNOTATIONS.items():
        path = f"metadata.annotations['{annotation}']"
        variables.append({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}})
    return variables


_INDEX = "JAXDIST_TASK_INDEX"
_INDEX_PATH = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_SECRET, _SNAPSHOTS = "/secret", "/snapshots"
# How often containers may start again. If tasks cannot start at all, the chief ends the job after
# it has waited for them for JAXDIST_JOIN_SECONDS.
_MOST_STARTS = 1_000_000
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")


@called("jaxdist launch --print jobset")
def make_task_jobset(request: TaskRequest) -> str:
    """Return the manifest, for `kubectl apply -f`.

    The chief, the parameter servers and the workers are one Job each. When the container of a
    parameter server or a worker is killed, Kubernetes starts it again under the same name. When
    the chief has ended, the JobSet ends the others.

    Raises:
        LaunchError: An option has no use in Kubernetes, or a manifest cannot hold the file.
        ArgumentError: `snapshot_directory` is not a valid name of a PersistentVolumeClaim.
    """
    claim = request.snapshot_directory
    if claim is not None and not _NAME.fullmatch(claim):
        raise refuse(
            f"--snapshot-directory {claim}.",
            "Pods share no folder but a volume, so this is the name of a PersistentVolumeClaim: "
            "small letters, digits, hyphens and dots. With several parameter servers, several "
            "nodes may write into it (ReadWriteMany).",
            "Pass for instance --snapshot-directory snapshots, or leave it out for volumes that "
            "end with their pods.",
        )
    base = request.request
    jobs = {job: _make_job(request, job) for job in request.counts}
    policies = {
        "successPolicy": {"operator": "All", "targetReplicatedJobs": ["chief"]},
        # The Job of the chief starts it again, while the others continue.
        "failurePolicy": {"maxRestarts": 0},
    }
    secret = _name_secret(base)
    comment = (
        "# The tasks know each other by a secret, which is made once:\n"
        f'#   kubectl create secret generic {secret} --from-literal=secret="$(python -c '
        "'import secrets; print(secrets.token_urlsafe())')\"\n"
    )
    if claim is None:
        comment += (
            "# Snapshots of a parameter server end with its pod, not with its container;\n"
            "# --snapshot-directory CLAIM keeps them in a PersistentVolumeClaim.\n"
        )
    whole = dataclasses.replace(request.make_part("chief"), count=base.count)
    return _write_manifest(whole, _wrap_jobs(base, jobs, policies), comment)


def _make_job(request: TaskRequest, job: str) -> dict[str, Any]:
    part, is_chief = request.make_part(job), job == "chief"
    volumes: dict[str, tuple[str, dict[str, Any]]] = {
        "secret": (_SECRET, {"secret": {"secretName": _name_secret(part)}})
    }
    variables = {
        "JAXDIST_SECRET_FILE": f"{_SECRET}/secret",
        **part.list_variables(os.environ),
    }
    if job == "ps":
        claim = request.snapshot_directory
        kept = (
            {"emptyDir": {}} if claim is None else {"persistentVolumeClaim": {"claimName": claim}}
        )
        volumes["snapshots"] = (_SNAPSHOTS, kept)
        variables["JAXDIST_SNAPSHOT_DIRECTORY"] = _SNAPSHOTS
    listed: list[dict[str, Any]] = [
        {"name": _INDEX, "valueFrom": {"fieldRef": {"fieldPath": _INDEX_PATH}}},
        # Kubernetes replaces `$(NAME)` by the value of a variable that is listed before.
        {"name": "TF_CONFIG", "value": _make_config(request, job)},
        *({"name": name, "value": escape(value)} for name, value in variables.items()),
    ]
    restart = "Never" if is_chief else "OnFailure"
    pod = make_pod(part, job, listed, restart, volumes)
    return _make_indexed_job(part, part.restarts if is_chief else _MOST_STARTS, pod)


def _make_config(request: TaskRequest, job: str) -> str:
    name = request.request.job_name
    cluster = {
        other: [f"{name}-{other}-0-{index}.{name}:{PORT}" for index in range(count)]
        for other, count in request.counts.items()
    }
    config = json.dumps({"cluster": cluster, "task": {"type": job, "index": "INDEX"}})
    return config.replace('"INDEX"', f"$({_INDEX})")


def _name_secret(request: Request) -> str:
    return f"{request.job_name}-secret"
