"""The clusters of strategies with parameter servers, and the devices of their workers."""

from collections.abc import Mapping
from typing import Any

import jax

from jaxdist import _mesh
from jaxdist._called import name_call, refuse, refuse_type
from jaxdist._cluster import Task, read_task
from jaxdist._devices import runtime
from jaxdist._parameter_server.transport import check_addresses
from jaxdist._validate import show
from jaxdist.cluster_resolver import ClusterResolver, SimpleClusterResolver, TFConfigClusterResolver
from jaxdist.errors import ClusterError, DeviceError, UnsupportedError

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
        ArgumentTypeError: `resolver` is not a `ClusterResolver`.
        ClusterError: The cluster has no servers or workers, or other jobs.
        ArgumentError: The address of one of them is not a host and port.
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
            "The tasks communicate by gRPC, or are all in this process: rpc_layer is 'grpc' or "
            "'local'.",
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
        ArgumentTypeError: `resolver` is not a `ClusterResolver`.
        ClusterError: The cluster has no parameter servers, or other jobs, or does not contain this
            task.
        ArgumentError: The address of a parameter server is not a host and port.
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
            "Every worker runs the same script, so its resolver has to identify the task.",
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


def find_worker_layouts(resolver: Any, workers: int) -> list[_mesh.ReplicaMesh]:
    """Return the replicas of each worker of a cluster.

    Workers in other processes run on one device, and their layout stands for them.

    Raises:
        DeviceError: There are fewer devices.
        UnsupportedError: Several replicas for workers in other processes.
    """
    if getattr(resolver, "rpc_layer", None) == "local":
        found = [find_worker_devices(resolver, n, workers) for n in range(workers)]
        return [_mesh.build(devices) for devices in found]
    kind, count = _read_stated(resolver)
    # Other resolvers count what a task has, which is not a request.
    if count > 1 and isinstance(resolver, SimpleClusterResolver):
        raise refuse(
            f"a resolver with num_accelerators={{{(kind or '').upper()!r}: {count}}}, and workers "
            "in other processes.",
            "A worker of its own process runs a function on one device; with rpc_layer='local' it "
            "may have several.",
            f"List {count} workers for each machine, with one device each, and leave "
            "num_accelerators out.",
            kind=UnsupportedError,
        )
    return [_mesh.build(jax.local_devices()[:1])] * workers


def find_layout_of_new_worker(
    resolver: Any, index: int, first: _mesh.ReplicaMesh
) -> _mesh.ReplicaMesh:
    """Return the replicas of a worker that joins those of this process.

    It has as many as the others, and devices of its own if these are several.

    Args:
        resolver: The resolver of the cluster.
        index: The number of the new worker.
        first: The replicas of the first worker.

    Raises:
        DeviceError: There are fewer devices.
    """
    kind, _ = _read_stated(resolver)
    present, count = runtime.local_devices(kind), first.num_replicas
    if count == 1:
        return _mesh.build([present[index % len(present)]])
    if len(present) < count * (index + 1):
        raise DeviceError(
            f"ClusterCoordinator.add_worker was called for worker {index}, with {count} replicas "
            f"like the others; this process has {len(present)} devices.\n\n"
            "Each replica of a worker runs on a device of its own.\n\n"
            "List fewer accelerators for each worker in the resolver, or start the worker as a "
            "process of its own."
        )
    return _mesh.build(present[index * count : (index + 1) * count])


def find_worker_devices(resolver: Any, index: int = 0, sharers: int = 1) -> list[jax.Device]:
    """Return the devices of one worker.

    Their number is that of `resolver.num_accelerators()`. If that is not given, they are the
    accelerators of this process, or one CPU device if it has none.

    Args:
        resolver: The resolver of the cluster.
        index: The number of the worker among those that share the devices of this process.
        sharers: How many workers share them. Those with several replicas have devices of their own,
            because two programs that wait for each other's devices would wait forever.

    Raises:
        DeviceError: There are fewer devices.
    """
    kind, count = _read_stated(resolver)
    present = runtime.local_devices(kind)
    if not count:
        count = 1 if present[0].platform == "cpu" else max(1, len(present) // sharers)
    if count == 1 and present:
        return [present[index % len(present)]]
    if len(present) < count * sharers:
        raise refuse(
            f"a resolver with num_accelerators={{{(kind or '').upper()!r}: {count}}} for each of "
            f"{sharers} worker(s) in this process, which has {len(present)} such devices.",
            "Each replica of a worker runs on a device of its own.",
            f"Pass num_accelerators={{{(kind or '').upper()!r}: {len(present) // sharers}}}, or "
            "leave it out.",
            kind=DeviceError,
        )
    return present[index * count : (index + 1) * count]


def _read_stated(resolver: Any) -> tuple[str | None, int]:
    """Return the kind and the number of devices that a resolver states; 0 for none."""
    # These count the devices of this process, as is done here without them.
    own = type(resolver).num_accelerators is ClusterResolver.num_accelerators
    if own or isinstance(resolver, TFConfigClusterResolver):
        return None, 0
    stated: dict[str, int] = {k.lower(): n for k, n in resolver.num_accelerators().items()}
    used = {kind: n for kind, n in stated.items() if n}
    if stated and not used:
        return "cpu", 1
    # A worker with GPUs also has CPUs, which are not replicas then.
    for kind, n in sorted(used.items(), key=lambda entry: entry[0] == "cpu"):
        return kind, n
    return None, 0
