"""`experimental_connect_to_cluster`: connection of the processes of a job."""

import logging
import os
from typing import Any

from jaxdist import _processes
from jaxdist._devices import chips
from jaxdist._validate import as_integer, check_text, show
from jaxdist.cluster_resolver._resolver import ClusterResolver
from jaxdist.errors import ArgumentError, ArgumentTypeError

_LOG = logging.getLogger("jaxdist")

# Jobs of which the tasks run no step together with the others.
_APART = ("ps", "evaluator")


def experimental_connect_to_cluster(
    cluster_spec_or_resolver: ClusterResolver,
    job_name: str | None = None,
    task_index: int | None = None,
) -> None:
    """Connect to the other processes of the job; call it before the first use of a device.

    On one machine, and for virtual and described TPUs, this does nothing. On a TPU slice of several
    hosts, JAX detects the processes. In any other cluster of several tasks, the processes connect
    to the address of the first task: chief, then workers. Parameter servers and evaluators do not
    take part. A second call does nothing.

    Args:
        cluster_spec_or_resolver: A resolver.
        job_name: The job of this process, if the resolver does not know it.
        task_index: The number of this process in the job, if the resolver does not know it.

    Raises:
        ArgumentTypeError: No resolver.
        ArgumentError: The cluster has several tasks, and this process is none of them.

    Example:
        >>> resolver = jaxdist.cluster_resolver.TPUClusterResolver("virtual:v5e:2x4")
        >>> jaxdist.config.experimental_connect_to_cluster(resolver)

    Source:
        `tf.config.experimental_connect_to_cluster`.
    """
    resolver = cluster_spec_or_resolver
    if not isinstance(resolver, ClusterResolver):
        raise ArgumentTypeError(
            f"experimental_connect_to_cluster was given cluster_spec_or_resolver={show(resolver)}."
            "\n\ncluster_spec_or_resolver is a ClusterResolver.\n\n"
            "Wrap a ClusterSpec: SimpleClusterResolver(cluster_spec, task_type=..., task_id=...)."
        )
    caller = "experimental_connect_to_cluster"
    if job_name is not None:
        check_text(caller, "job_name", job_name, "worker")
    if task_index is not None:
        task_index = as_integer(caller, "task_index", task_index, least=0)
    # JAX raises an error at a second call.
    if _processes.is_connected():
        return
    # The environment of a TPU VM lists its hosts, so JAX connects them without an address.
    tasks = _list_training_tasks(resolver)
    if getattr(resolver, "tpu_name", None) == "local":
        hosts = [job for job, _ in tasks if job == resolver.task_type]
        # The list of hosts contains one slice only, so the number of slices counts as well.
        if len(hosts) > 1 or int(os.environ.get("MEGASCALE_NUM_SLICES") or 1) > 1:
            _processes.connect()
        elif not hosts:
            _connect_where_detected()
        return
    if len(tasks) < 2:
        return
    me = (job_name or resolver.task_type, _own(task_index, resolver.task_id))
    if me[0] in _APART:
        return
    if me not in tasks:
        raise ArgumentError(
            f"{caller} was given a cluster of {len(tasks)} tasks, {list(tasks)[:8]}, and this "
            f"process is {me[0]!r} {me[1]!r}.\n\n"
            "Each process is one of the tasks of the cluster.\n\n"
            f"Say which: SimpleClusterResolver(..., task_type={next(iter(tasks))[0]!r}, "
            f"task_id={next(iter(tasks))[1]!r})."
        )
    _processes.connect(
        coordinator_address=next(iter(tasks.values())),
        num_processes=len(tasks),
        process_id=list(tasks).index(me),
    )


def _connect_where_detected() -> None:
    """Join the other hosts of a slice that JAX finds through the metadata server.

    Does nothing on a machine without chips or outside of Google Cloud.
    """
    # The environment variable says that there is no metadata server: JAX would wait for one.
    if not chips.chips_of_this_machine() or "TPU_SKIP_MDS_QUERY" in os.environ:
        return
    try:
        _processes.connect()
    except (OSError, ValueError, RuntimeError) as error:
        # No metadata server, no other hosts, or JAX has started already: one host can go on alone.
        _LOG.info("No other hosts were joined: %s", str(error).split("\n")[0])


def _own(task_index: int | None, task_id: int | None) -> int | None:
    return task_id if task_index is None else task_index


def _list_training_tasks(resolver: ClusterResolver) -> dict[tuple[Any, Any], str]:
    """Return the addresses of the tasks that train together: the chief first, then the workers.

    The order is the same in all processes, since it defines the process numbers.
    """
    spec = resolver.cluster_spec()
    jobs = dict.fromkeys(["chief", resolver.task_type or "worker", "worker"])
    return {
        (job, i): spec.task_address(job, i)
        for job in jobs
        if job in spec.jobs and job not in _APART
        for i in spec.task_indices(job)
    }
