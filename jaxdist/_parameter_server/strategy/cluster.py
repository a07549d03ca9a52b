"""Checks the clusters of strategies with parameter servers."""

from collections.abc import Mapping
from typing import Any

from jaxdist._called import name_call, refuse, refuse_type
from jaxdist._cluster import Task, read_task
from jaxdist._parameter_server.transport import check_addresses
from jaxdist._validate import show
from jaxdist.cluster_resolver import ClusterResolver
from jaxdist.errors import ClusterError

_JOBS = ("chief", "worker", "ps", "evaluator")
_RESOLVER = "cluster_resolver is a ClusterResolver, which lists the tasks of the cluster."
_RULE = "A ParameterServerStrategy needs tasks of both jobs: 'ps' and 'worker'."
_REMEDY = (
    "Describe for instance ClusterSpec({'chief': ['host0:2222'], 'worker': ['host1:2222'], 'ps': "
    "['host2:2222']})."
)
_JOBS_1 = ("chief", "worker", "evaluator", "ps")
_REMEDY_1 = (
    "Pass for instance SimpleClusterResolver(ClusterSpec({'ps': ['host0:2222'], 'worker': "
    "['host1:2222', 'host2:2222']}), task_type='worker', task_id=0)."
)


def read_cluster(resolver: Any) -> Task:
    """Check that a resolver describes a cluster with parameter servers, and return its tasks.

    Raises:
        ArgumentTypeError: `resolver` is no `ClusterResolver`.
        ClusterError: The cluster has no servers or workers, or other jobs.
        ArgumentError: The address of one of them is no host and port.
    """
    if not isinstance(resolver, ClusterResolver):
        given = "no cluster_resolver" if resolver is None else f"cluster_resolver={show(resolver)}"
        raise refuse_type(
            f"{given}.",
            _RESOLVER,
            "Pass jaxdist.cluster_resolver.TFConfigClusterResolver(), which reads TF_CONFIG. For "
            "a cluster inside of this process pass SimpleClusterResolver(ClusterSpec({'worker': "
            "['w:1'], 'ps': ['p:1']}), rpc_layer='local').",
        )
    task = read_task(resolver)
    counts = task.counts
    if not counts:
        raise _refuse("a cluster without tasks", "A cluster has servers and workers.")
    for job in counts:
        if job not in _JOBS:
            raise _refuse(f"a cluster with the job {job!r}", f"Its jobs are {', '.join(_JOBS)}.")
    _check_single(counts, {"chief": "One task coordinates the others."}, _REMEDY)
    for job, what in (("ps", "parameter servers"), ("worker", "workers")):
        if not counts.get(job):
            raise _refuse(f"a cluster without {what} (the job {job!r})", _RULE)
    if task.job is not None and task.job not in _JOBS:
        rule = f"The type of a task is one of {', '.join(_JOBS)}."
        raise _refuse(f"task_type={task.job!r}", rule)
    layer = getattr(resolver, "rpc_layer", None)
    if layer and layer != "local" and not layer.startswith("grpc"):
        raise _refuse(
            f"a cluster_resolver with rpc_layer={layer!r}",
            "The tasks talk by gRPC, or are all in this process: rpc_layer is 'grpc' or 'local'.",
        )
    if not task.is_local:
        check_addresses({"ps": task.servers, "worker": task.workers})
    return task


def check_is_coordinator(task: Task) -> None:
    """Raise in a process that is a worker or a parameter server.

    Raises:
        ClusterError: It is one.
    """
    job, index = task.job, task.index or 0
    if job in ("worker", "ps"):
        raise ClusterError(
            f"{name_call()} was made in a process that is {job} {index} of its cluster.\n\n"
            "The chief makes the strategy. The other tasks serve, and run no code of the training."
            f"\n\nIn this process call jaxdist.Server(cluster_spec, {job!r}, {index}).join(), or "
            f"run `jaxdist server --type {job} --index {index}`. If it is the chief, its "
            "TF_CONFIG has another task type."
        )


def read_own_task(resolver: Any) -> Task | None:
    """Return which task this process is, for a strategy that each worker makes for itself.

    Returns:
        The task; None if the resolver has no cluster.

    Raises:
        ArgumentTypeError: `resolver` is no `ClusterResolver`.
        ClusterError: The cluster has no parameter servers, or other jobs, or does not contain this
            task.
        ArgumentError: The address of a parameter server is no host and port.
    """
    if not isinstance(resolver, ClusterResolver):
        raise refuse_type(
            f"cluster_resolver={show(resolver)}.",
            _RESOLVER,
            "Pass for instance jaxdist.cluster_resolver.TFConfigClusterResolver(), or nothing.",
        )
    task = read_task(resolver)
    counts, job = task.counts, task.job
    if not counts:
        return None
    if not job or task.index is None:
        raise _refuse(
            f"a cluster, and task_type={show(job)}, task_id={show(task.index)}",
            "Every worker runs the same script, so its resolver has to say which task it is.",
            _REMEDY_1,
        )
    if not counts.get("ps"):
        raise _refuse(
            f"a cluster of the jobs {', '.join(counts)}",
            "Variables are on parameter servers, which are the tasks of the job 'ps'.",
            _REMEDY_1,
        )
    for name in [*counts, job]:
        if name not in _JOBS_1:
            rule = f"The jobs are {', '.join(_JOBS_1)}."
            raise _refuse(f"the job {name!r}", rule, _REMEDY_1)
    single = {name: f"There is at most one {name}." for name in ("chief", "evaluator")}
    _check_single(counts, single, _REMEDY_1)
    # The cluster need not list the evaluator, which nobody connects to.
    is_apart = (job, task.index) == ("evaluator", 0) and job not in counts
    if not task.is_listed and not is_apart:
        raise _refuse(
            f"task_type={job!r}, task_id={task.index}, and a cluster with {counts.get(job, 0)} "
            "tasks of that job",
            "The numbers of tasks begin at 0, and this process is one of them.",
            _REMEDY_1,
        )
    if not task.is_local:
        check_addresses({"ps": task.servers})
    return task


def _check_single(counts: Mapping[str, int], rules: Mapping[str, str], remedy: str) -> None:
    for job, rule in rules.items():
        if counts.get(job, 0) > 1:
            raise _refuse(f"a cluster with {counts[job]} tasks of the job {job!r}", rule, remedy)


def _refuse(found: str, rule: str, remedy: str = _REMEDY) -> ClusterError:
    return refuse(f"{found}.", rule, remedy, kind=ClusterError)
