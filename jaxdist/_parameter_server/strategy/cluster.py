"""The tasks of a cluster with parameter servers."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxdist._called import name_call, refuse
from jaxdist._parameter_server.transport import check_addresses
from jaxdist._validate import show
from jaxdist.cluster_resolver import ClusterResolver
from jaxdist.errors import ArgumentTypeError, ClusterError

_JOBS = ("chief", "worker", "ps", "evaluator")
_RULE = "A ParameterServerStrategy needs tasks of both jobs: 'ps' and 'worker'."
_EXAMPLE = "{'chief': ['host0:2222'], 'worker': ['host1:2222'], 'ps': ['host2:2222']}"


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The addresses of the tasks.

    Args:
        ps: The addresses of the parameter servers.
        workers: The addresses of the workers.
        is_local: Whether all tasks are in this process.
        task_type: The job of this process; None if the resolver does not tell.
        task_id: Its number.
    """

    ps: Sequence[str]
    workers: Sequence[str]
    is_local: bool
    task_type: str | None
    task_id: int | None


def read_cluster(resolver: Any) -> Cluster:
    """Check that a resolver describes a cluster with parameter servers, and return its tasks.

    Raises:
        ArgumentTypeError: `resolver` is no `ClusterResolver`.
        ClusterError: The cluster has no servers or workers, or other jobs.
        ArgumentError: The address of one of them is no host and port.
    """
    if not isinstance(resolver, ClusterResolver):
        given = "no cluster_resolver" if resolver is None else f"cluster_resolver={show(resolver)}"
        raise refuse(
            ArgumentTypeError,
            f"{given}.",
            "cluster_resolver is a ClusterResolver, which lists the tasks of the cluster.",
            "Pass jaxdist.cluster_resolver.TFConfigClusterResolver(), which reads TF_CONFIG. For "
            "a cluster inside of this process pass SimpleClusterResolver(ClusterSpec({'worker': "
            "['w:1'], 'ps': ['p:1']}), rpc_layer='local').",
        )
    tasks = resolver.cluster_spec().as_dict()
    if not tasks:
        raise _make_error("a cluster without tasks", "A cluster has servers and workers.")
    wrong = [job for job in tasks if job not in _JOBS]
    if wrong:
        raise _make_error(
            f"a cluster with the job {wrong[0]!r}", f"Its jobs are {', '.join(_JOBS)}."
        )
    spec = resolver.cluster_spec()
    lists = {job: [task for task in spec.job_tasks(job) if task is not None] for job in tasks}
    if len(lists.get("chief", [])) > 1:
        raise _make_error(
            f"a cluster with {len(lists['chief'])} tasks of the job 'chief'",
            "One task coordinates the others.",
        )
    for job, what in (("ps", "parameter servers"), ("worker", "workers")):
        if not lists.get(job):
            raise _make_error(f"a cluster without {what} (the job {job!r})", _RULE)
    task = resolver.task_type
    if task is not None and task not in _JOBS:
        raise _make_error(
            f"task_type={task!r}", f"The type of a task is one of {', '.join(_JOBS)}."
        )
    layer = getattr(resolver, "rpc_layer", None)
    if layer and layer != "local" and not layer.startswith("grpc"):
        raise _make_error(
            f"a cluster_resolver with rpc_layer={layer!r}",
            "The tasks talk by gRPC, or are all in this process: rpc_layer is 'grpc' or 'local'.",
        )
    is_local = layer == "local"
    if not is_local:
        check_addresses({job: lists[job] for job in ("ps", "worker")})
    return Cluster(lists["ps"], lists["worker"], is_local, task, resolver.task_id)


def check_is_chief(cluster: Cluster) -> None:
    """Raise in a process that is a worker or a parameter server.

    Raises:
        ClusterError: It is one.
    """
    job, number = cluster.task_type, cluster.task_id or 0
    if job in ("worker", "ps"):
        raise ClusterError(
            f"{name_call()} was made in a process that is {job} {number} of its cluster.\n\n"
            "The chief makes the strategy. The other tasks serve, and run no code of the training."
            f"\n\nIn this process call jaxdist.Server(cluster_spec, {job!r}, {number}).join(), or "
            f"run `jaxdist server --type {job} --index {number}`. If it is the chief, its "
            "TF_CONFIG has another task type."
        )


def _make_error(found: str, rule: str) -> ClusterError:
    return refuse(
        ClusterError, f"{found}.", rule, f"Describe for instance ClusterSpec({_EXAMPLE})."
    )
