"""Writes a Kubernetes JobSet for the job of a command: one pod for each process."""

import os
from typing import Any

from jaxdist._launching.files.pod import escape, make_config_map, make_pod
from jaxdist._launching.files.request import Request
from jaxdist._launching.files.text import write_yaml

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
    return write_manifest(request, _make_jobset(request))


def write_manifest(request: Request, jobset: dict[str, Any], comment: str = "") -> str:
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
    job: dict[str, Any] = {
        # The first pod that fails ends the Job; then the JobSet starts all pods again.
        "backoffLimit": 0,
        "completionMode": "Indexed",
        "completions": request.count,
        "parallelism": request.count,
    }
    if request.seconds is not None:
        job["activeDeadlineSeconds"] = request.seconds
    job["template"] = {"spec": make_pod(request, "worker", _list_variables(request))}
    return wrap_jobs(request, {_JOB: job}, {"failurePolicy": {"maxRestarts": request.restarts}})


def wrap_jobs(
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
