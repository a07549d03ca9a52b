"""`experimental_connect_to_cluster`: connects the processes of a job."""

import logging
import os
from collections.abc import Mapping
from typing import Any

from jaxdist import _devices, _processes
from jaxdist._called import called
from jaxdist._validate import as_integer, check_text, show
from jaxdist.cluster_resolver._cluster_spec import ClusterDef, ClusterSpec
from jaxdist.cluster_resolver._resolver import ClusterResolver, find_own_task, list_training_tasks
from jaxdist.cluster_resolver._simple import SimpleClusterResolver
from jaxdist.errors import ArgumentTypeError, ClusterError

_LOG = logging.getLogger("jaxdist")
_CALLER = "experimental_connect_to_cluster"
_GIVEN = f"{_CALLER} was given cluster_spec_or_resolver"


@called(_CALLER)
def experimental_connect_to_cluster(
    cluster_spec_or_resolver: ClusterResolver | ClusterSpec | Mapping[str, Any] | ClusterDef,
    job_name: str | None = None,
    task_index: int | None = None,
) -> None:
    """Connect to the other processes of the job; call it before the first use of a device.

    On one machine, and for virtual and described TPUs, this does nothing. On a TPU slice of several
    hosts, JAX detects the processes. In any other cluster of several tasks, the processes connect
    to the address of the first task: chief, then workers. Parameter servers and evaluators do not
    take part. A second call does nothing.

    Args:
        cluster_spec_or_resolver: A resolver; or a cluster: a `ClusterSpec`, a dict, or TensorFlow's
            `ClusterDef` or `ServerDef`.
        job_name: The job of this process, if the resolver does not know it. With a cluster, it is
            optional only if there is one job.
        task_index: The number of this process in the job, if the resolver does not know it. With a
            cluster, it is optional only if the job has one task.

    Raises:
        ArgumentTypeError: The first argument is neither a resolver nor a cluster.
        ClusterError: The cluster has several tasks, and this process is not one of them, or nothing
            says which one; a job has an unknown type; or the processes cannot connect.

    Example:
        >>> resolver = jaxdist.cluster_resolver.TPUClusterResolver("virtual:v5e:2x4")
        >>> jaxdist.config.experimental_connect_to_cluster(resolver)

    Source:
        `tf.config.experimental_connect_to_cluster`; clusters as in `tf.distribute.Server`.
    """
    if job_name is not None:
        check_text("job_name", job_name, "worker")
    if task_index is not None:
        task_index = as_integer("task_index", task_index, least=0)
    resolver = _read_resolver(cluster_spec_or_resolver, job_name, task_index)
    # JAX raises an error if it is initialized a second time.
    if _processes.is_connected():
        return
    tasks = list_training_tasks(resolver)
    # The environment of a TPU VM lists its hosts, so JAX connects them without an address.
    if getattr(resolver, "tpu_name", None) == "local":
        hosts = [job for job, _ in tasks if job == resolver.task_type]
        # The list contains only the hosts of one slice, so also check the number of slices.
        if len(hosts) > 1 or int(os.environ.get("MEGASCALE_NUM_SLICES") or 1) > 1:
            _processes.connect()
        elif not hosts:
            _connect_where_detected()
        return
    if not any(resolver.cluster_spec().as_dict().values()):
        return
    own = find_own_task(resolver, job_name, task_index)
    if own in tasks and len(tasks) > 1:
        _processes.join(list(tasks.values()), list(tasks).index(own))


@called(_CALLER, replaces="ClusterSpec", arguments={"cluster": "cluster_spec_or_resolver"})
def _read_resolver(given: Any, job_name: str | None, task_index: int | None) -> ClusterResolver:
    if isinstance(given, ClusterResolver):
        return given
    if hasattr(given, "cluster") and hasattr(given, "job_name") and hasattr(given, "task_index"):
        # In a message, a number that was never set is 0.
        job_name = job_name or given.job_name or None
        task_index = given.task_index if task_index is None else task_index
        given = given.cluster
    if not isinstance(given, (ClusterSpec, Mapping)) and not hasattr(given, "job"):
        raise ArgumentTypeError(
            f"{_GIVEN}={show(given)}.\n\n"
            "cluster_spec_or_resolver is a ClusterResolver, a ClusterSpec, or a dict from jobs to "
            "addresses.\n\nPass for instance TFConfigClusterResolver()."
        )
    spec = ClusterSpec(given)
    job = spec.jobs[0] if job_name is None and len(spec.jobs) == 1 else job_name
    known = spec.task_indices(job) if job in spec.jobs else []
    index = known[0] if task_index is None and len(known) == 1 else task_index
    if job is None or index is None:
        missing, count = ("job_name", f"{len(spec.jobs)} jobs")
        if job is not None:
            missing, count = ("task_index", f"{len(known)} tasks of job {job!r}")
        raise ClusterError(
            f"{_GIVEN}={show(given)}, with {count}, and no {missing}.\n\n"
            "A cluster does not say which of its tasks this process is.\n\n"
            "Pass job_name='worker', task_index=0 in the first worker, and so on."
        )
    return SimpleClusterResolver(spec, task_type=job, task_id=index)


def _connect_where_detected() -> None:
    """Join the other hosts of a slice that JAX finds through the metadata server.

    Does nothing on a machine without chips or outside Google Cloud.
    """
    # The environment variable says that there is no metadata server: JAX would wait for one.
    if not _devices.chips.chips_of_this_machine() or "TPU_SKIP_MDS_QUERY" in os.environ:
        return
    try:
        _processes.connect()
    except (OSError, ValueError, RuntimeError) as error:
        # No metadata server, no other hosts, or JAX has already started: continue with one host.
        _LOG.info("No other hosts were joined: %s", str(error).split("\n")[0])
