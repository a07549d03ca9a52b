"""Finds the tasks that train together, and which task this process is."""

from typing import TypeAlias

from jaxdist._called import name_call, refuse
from jaxdist.cluster_resolver._resolver import ClusterResolver
from jaxdist.errors import ClusterError

Task: TypeAlias = tuple[str, int]

_TRAINING = ("chief", "worker")
# Jobs whose tasks run no step together with the others.
_APART = ("evaluator", "ps")


def list_training_tasks(resolver: ClusterResolver) -> dict[Task, str]:
    """Return the addresses of the tasks that train together: the chief first, then the workers.

    The order is the same in all processes, since it defines the process numbers.

    Example:
        >>> from jaxdist import cluster_resolver
        >>> spec = cluster_resolver.ClusterSpec({"worker": ["b:1"], "chief": ["a:1"]})
        >>> cluster_resolver.list_training_tasks(cluster_resolver.SimpleClusterResolver(spec))
        {('chief', 0): 'a:1', ('worker', 0): 'b:1'}
    """
    spec = resolver.cluster_spec()
    jobs = dict.fromkeys(["chief", *_list_own_names(resolver), "worker"])
    return {
        (job, i): spec.task_address(job, i)
        for job in jobs
        if job in spec.jobs and job not in _APART
        for i in spec.task_indices(job)
    }


def find_own_task(
    resolver: ClusterResolver,
    job_name: str | None = None,
    task_index: int | None = None,
) -> Task | None:
    """Return the job and the number of this process, after checking them and the cluster.

    An evaluator need not be in the cluster. Without a cluster and a task, the job is one process.

    Args:
        resolver: The resolver.
        job_name: The job of this process, instead of the resolver's.
        task_index: Its number, instead of the resolver's.

    Returns:
        The task, or None for a job of one process.

    Raises:
        ClusterError: The process is not one of the tasks, a job has an unknown type, there are
            several chiefs, or there is a task but no cluster.

    Example:
        >>> from jaxdist import cluster_resolver
        >>> spec = cluster_resolver.ClusterSpec({"worker": ["a:1", "b:1"]})
        >>> resolver = cluster_resolver.SimpleClusterResolver(spec)
        >>> cluster_resolver.find_own_task(resolver, "worker", 1)
        ('worker', 1)
    """
    # Slurm's resolver knows its task only after this call.
    spec = resolver.cluster_spec()
    job = resolver.task_type if job_name is None else job_name
    index = resolver.task_id if task_index is None else task_index
    source = resolver._describe_source()
    quote = f" ({source})" if source else ""
    known = [*_TRAINING, *_APART, *_list_own_names(resolver)]
    # A resolver of TPUs may also list a coordinator.
    strange = [] if _list_own_names(resolver) else [n for n in spec.jobs if n not in known]
    if job is not None and job not in known:
        strange.append(job)
    if strange:
        instead = "chief" if strange[0] == "master" else "worker"
        raise ClusterError(
            f"{name_call()} found a job of the unknown type {strange[0]!r}{quote}.\n\n"
            f"The jobs of a cluster are {', '.join(known)}.\n\nCall it {instead!r}."
        )
    if "chief" in spec.jobs and spec.num_tasks("chief") > 1:
        raise ClusterError(
            f"{name_call()} found {spec.num_tasks('chief')} chiefs{quote}.\n\n"
            "A cluster has at most one chief.\n\nMake the others workers."
        )
    tasks = [(name, i) for name in spec.jobs for i in spec.task_indices(name)]
    if not tasks:
        # A single TPU host has a task but no address.
        if hasattr(resolver, "tpu_name") or (not spec and job is None and index is None):
            return None
        raise ClusterError(
            f"{name_call()} found no cluster, and this process is {job!r} {index!r}{quote}.\n\n"
            "A task is one of a cluster, which lists the addresses of all tasks.\n\n"
            'Add the cluster, for instance "cluster": {"worker": ["host0:2222", "host1:2222"]}, or '
            "leave out the task for a job of one process."
        )
    if len(tasks) == 1 and (job is None or index is None):
        return tasks[0]
    if job is None or index is None or ((job, index) not in tasks and job != "evaluator"):
        shown = f"{tasks[0][0]!r}, {tasks[0][1]}"
        raise refuse(
            f"a cluster of {len(tasks)} tasks, {tasks[:8]}, and this process is {job!r} {index!r}"
            f"{quote}.",
            "Each process is one of the tasks of the cluster.",
            f"Say which, for instance {shown}: SimpleClusterResolver(..., task_type="
            f'{tasks[0][0]!r}, task_id={tasks[0][1]}), or in TF_CONFIG "task": {{"type": "'
            f'{tasks[0][0]}", "index": {tasks[0][1]}}}.',
            kind=ClusterError,
        )
    return job, index


def _list_own_names(resolver: ClusterResolver) -> list[str]:
    """Return the job of the hosts of a TPU slice, which may have any name."""
    own = resolver.task_type if hasattr(resolver, "tpu_name") else None
    return [own] if own else []
