"""Writes a JobSet for parameter servers, workers and a chief."""

import dataclasses
import json
import os
import re
from typing import Any

from jaxdist._called import called, refuse
from jaxdist._launching.files.jobset import wrap_jobs, write_manifest
from jaxdist._launching.files.pod import PORT, escape, make_pod
from jaxdist._launching.files.request import Request
from jaxdist._launching.files.tasks import TaskRequest

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
    return write_manifest(whole, wrap_jobs(base, jobs, policies), comment)


def _make_job(request: TaskRequest, job: str) -> dict[str, Any]:
    part, count, is_chief = request.make_part(job), request.counts[job], job == "chief"
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
    made: dict[str, Any] = {
        "backoffLimit": part.restarts if is_chief else _MOST_STARTS,
        "completionMode": "Indexed",
        "completions": count,
        "parallelism": count,
    }
    if part.seconds is not None:
        made["activeDeadlineSeconds"] = part.seconds
    restart = "Never" if is_chief else "OnFailure"
    made["template"] = {"spec": make_pod(part, job, listed, restart, volumes)}
    return made


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
