"""Finds the pods of an indexed Job or a JobSet from the environment of one of them.

Kubernetes gives each pod of an indexed Job its number and the host name `<job>-<number>`; a
headless service gives these names addresses. So no process needs the right to list pods.
"""

import dataclasses
from collections.abc import Mapping

from jaxdist.errors import ClusterError

INDEX = "JOB_COMPLETION_INDEX"
MOST_PODS = 1_000_000
_PER_JOB = "PROCESSES_IN_JOB"
_TOTAL = "JAX_PROCESS_COUNT"


@dataclasses.dataclass(frozen=True)
class IndexedJob:
    """The host names of all pods, in the order of their numbers, and the number of this pod."""

    hosts: tuple[str, ...]
    index: int


def read_indexed_job(
    environ: Mapping[str, str],
    service: str | None,
    processes: int | None,
    processes_in_job: int | None,
) -> IndexedJob:
    """Return the pods of the indexed Job or JobSet to which this pod belongs.

    Args:
        environ: The environment of the pod.
        service: Name of the headless service; None for the name of the JobSet.
        processes: Number of all pods; None for `JAX_PROCESS_COUNT`.
        processes_in_job: Number of pods of each Job; None for `PROCESSES_IN_JOB`.

    Raises:
        ClusterError: A variable is missing, or two contradict each other.
    """
    pod = _read_integer(environ, INDEX)
    per_job = processes_in_job or _read_count(environ, _PER_JOB)
    total = processes or _read_count(environ, _TOTAL)
    jobset = environ.get("JOBSET_NAME")
    if jobset is None:
        total = total or per_job
        job = _strip_number(environ.get("HOSTNAME", ""), pod)
        names, own = [job], 0
    else:
        own = _read_integer(environ, "JOB_INDEX") if "JOB_INDEX" in environ else 0
        # With one Job of the JobSet, the pods of the Job are all pods.
        if "JOB_INDEX" not in environ:
            total, per_job = total or per_job, per_job or total
        replicated = _find_replicated_job(environ, jobset, own, pod)
        if total and per_job and total % per_job:
            raise _contradict(f"{total} processes", f"{per_job} in each Job")
        names = [f"{jobset}-{replicated}-{i}" for i in range((total or 0) // (per_job or 1))]
    service = service or jobset
    if service is None:
        raise _miss(
            environ,
            "service",
            "Pods of an indexed Job have addresses only by a headless service. Its name is the "
            "`subdomain` of the pods.",
            "Pass service='my-service', or run a JobSet, which has one with its own name.",
        )
    if not total or (jobset is not None and not per_job):
        missing = _TOTAL if not total else _PER_JOB
        raise _miss(
            environ,
            missing,
            "Kubernetes tells a pod its own number, and not how many pods there are.",
            f"Set {missing} in the pod's `env` to the number of "
            f"{'all pods' if missing == _TOTAL else 'pods of a Job (`completions`)'}, or pass "
            f"{'processes' if missing == _TOTAL else 'processes_in_job'}.",
        )
    per_job = total // len(names) if jobset is None else per_job or total
    if pod >= per_job or own >= len(names):
        raise _contradict(f"pod {pod} of Job {own}", f"{len(names)} Jobs with {per_job} pods each")
    hosts = [f"{name}-{i}.{service}" for name in names for i in range(per_job)]
    return IndexedJob(tuple(hosts), own * per_job + pod)


def _find_replicated_job(environ: Mapping[str, str], jobset: str, job: int, pod: int) -> str:
    name = environ.get("REPLICATED_JOB_NAME")
    host = environ.get("HOSTNAME", "")
    start, end = f"{jobset}-", f"-{job}-{pod}"
    # A pod that uses the host's network has the host name of the machine.
    derived = host[len(start) : -len(end)] if host.startswith(start) and host.endswith(end) else ""
    if name and host.startswith(f"{start}{name}-") and derived != name:
        raise _contradict(f"HOSTNAME={host!r}", f"JOB_INDEX={job}, {INDEX}={pod}")
    if not name and not derived:
        raise _miss(
            environ,
            "REPLICATED_JOB_NAME",
            f"Pods of a JobSet are called <JobSet>-<job>-<number>-<number>, and HOSTNAME={host!r}.",
            "Set REPLICATED_JOB_NAME in the pod's `env` from the annotation "
            "jobset.sigs.k8s.io/replicatedjob-name.",
        )
    return name or derived


def _strip_number(host: str, pod: int) -> str:
    if not host.endswith(f"-{pod}") or host == f"-{pod}":
        raise _contradict(f"HOSTNAME={host!r}", f"{INDEX}={pod}")
    return host.removesuffix(f"-{pod}")


def _read_integer(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    if not text.isdecimal() or int(text) > MOST_PODS:
        raise ClusterError(
            f"KubernetesClusterResolver read {name}={text!r}.\n\n"
            f"It is an integer from 0 to {MOST_PODS}.\n\n"
            "Kubernetes sets JOB_COMPLETION_INDEX in pods of a Job with completionMode: Indexed; "
            "JOB_INDEX comes from the annotation jobset.sigs.k8s.io/job-index."
        )
    return int(text)


def _read_count(environ: Mapping[str, str], name: str) -> int | None:
    return _read_integer(environ, name) if name in environ else None


def _miss(environ: Mapping[str, str], name: str, rule: str, remedy: str) -> ClusterError:
    return ClusterError(
        f"KubernetesClusterResolver read {INDEX}={environ.get(INDEX)!r}, and {name} is missing.\n\n"
        f"{rule}\n\n{remedy}"
    )


def _contradict(one: str, other: str) -> ClusterError:
    return ClusterError(
        f"KubernetesClusterResolver found {one}, and {other}: they contradict each other.\n\n"
        "Pods of an indexed Job are called <job>-<number>; those of a JobSet "
        "<JobSet>-<job>-<number of the Job>-<number>.\n\nCorrect the variables in the pod's `env`, "
        "or pass job_to_label_mapping, which lists the pods."
    )
