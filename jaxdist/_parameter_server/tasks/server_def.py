"""`ServerDef`: the cluster of a server, and its task there."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxdist._called import called, refuse, refuse_type
from jaxdist._parameter_server.transport import check_addresses
from jaxdist._validate import as_integer, check_instance, show
from jaxdist.cluster_resolver import ClusterResolver, ClusterSpec
from jaxdist.errors import NotFoundError, UnsupportedError

CALLER = "jaxdist.Server"
_EXAMPLE = "{'worker': ['host0:2222'], 'ps': ['host1:2222']}"


@dataclasses.dataclass(frozen=True)
class ServerDef:
    """The cluster of a server, and its task there.

    Args:
        cluster: The addresses of all tasks.
        job_name: The job of the task.
        task_index: Its number.
        protocol: `grpc`.

    Source:
        `tf.train.ServerDef`.
    """

    cluster: ClusterSpec
    job_name: str
    task_index: int
    protocol: str = "grpc"

    @property
    def address(self) -> str:
        """The address of the task."""
        return self.cluster.task_address(self.job_name, self.task_index)


def read_server_def(
    given: Any, job_name: str | None, task_index: int | None, protocol: str | None
) -> ServerDef:
    """Return the task that a server is.

    Args:
        given: A `ServerDef`, a `ClusterSpec`, what `as_cluster_def` returns, or a dict.
        job_name: The job; None for that of the `ServerDef`, or the only one of the cluster.
        task_index: The number; None for that of the `ServerDef`, or the only one of the job.
        protocol: None for that of the `ServerDef`, or `grpc`.

    Raises:
        ArgumentTypeError: `given` is none of these.
        ArgumentError: The job or the number is not given, and there are several; or an address of
            a server or worker is not a host and port.
        NotFoundError: The cluster has no such task.
        UnsupportedError: Another protocol.
    """
    cluster_def = getattr(given, "cluster", None)
    if cluster_def is not None and not isinstance(given, Mapping):
        # A message of TensorFlow has empty strings where nothing is set.
        job_name = (getattr(given, "job_name", None) or None) if job_name is None else job_name
        task_index = getattr(given, "task_index", None) if task_index is None else task_index
        protocol = (getattr(given, "protocol", None) or None) if protocol is None else protocol
        given = cluster_def
    if isinstance(given, ClusterResolver):
        raise refuse_type(
            f"server_or_cluster_def={show(given)}.",
            "It takes the cluster, the job and the number of the task. A resolver knows all three.",
            f"Call {CALLER}(resolver.cluster_spec(), resolver.task_type, resolver.task_id).",
        )
    if not isinstance(given, (ClusterSpec, Mapping)) and not hasattr(given, "job"):
        raise refuse_type(
            f"server_or_cluster_def={show(given)}.",
            "It is a ClusterSpec, a dict from jobs to addresses, or a ServerDef.",
            f"Pass for instance {_EXAMPLE}.",
        )
    cluster = _read_cluster(given)
    if protocol is not None and not (isinstance(protocol, str) and protocol == "grpc"):
        raise refuse(
            f"protocol={show(protocol)}.",
            "Tasks speak gRPC.",
            "Leave protocol= out.",
            kind=UnsupportedError,
        )
    job = _find_job(cluster, job_name)
    # A server may be at a free port.
    jobs = {name: cluster.job_tasks(name) for name in ("ps", "worker", job) if name in cluster.jobs}
    check_addresses(jobs, lowest=0)
    return ServerDef(cluster, job, _find_index(cluster, job, task_index))


@called(CALLER, replaces="ClusterSpec", arguments={"cluster": "server_or_cluster_def"})
def _read_cluster(given: Any) -> ClusterSpec:
    cluster = ClusterSpec(given)
    if not cluster:
        raise refuse(
            "server_or_cluster_def without a job.",
            "A server is one of the tasks of a cluster.",
            f"Pass for instance {_EXAMPLE}.",
        )
    return cluster


def _find_job(cluster: ClusterSpec, job_name: str | None) -> str:
    if job_name is None:
        if len(cluster.jobs) == 1:
            return cluster.jobs[0]
        raise refuse(
            f"no job_name, and a cluster with the jobs {cluster.jobs}.",
            "job_name may be left out only if the cluster has one job.",
            "Pass job_name='worker', or resolver.task_type.",
        )
    remedy = f"Pass one of {cluster.jobs}."
    check_instance("job_name", job_name, str, "the name of a job", remedy)
    if job_name not in cluster.jobs:
        raise refuse(
            f"job_name={job_name!r}, and the cluster has no such job.",
            f"Its jobs are {cluster.jobs}.",
            remedy,
            kind=NotFoundError,
        )
    return job_name


def _find_index(cluster: ClusterSpec, job: str, task_index: int | None) -> int:
    indices = cluster.task_indices(job)
    if task_index is None:
        if len(indices) == 1:
            return indices[0]
        raise refuse(
            f"no task_index, and a cluster with {len(indices)} tasks of the job {job!r}.",
            "task_index may be left out only if the job has one task.",
            "Pass task_index=0, or resolver.task_id.",
        )
    index = as_integer("task_index", task_index, least=0)
    if index not in indices:
        raise refuse(
            f"task_index={index}, and job {job!r} has no such task.",
            f"Its tasks are {indices}.",
            "Pass one of these.",
            kind=NotFoundError,
        )
    return index
