"""`ClusterResolver`, the base class: the tasks of a cluster, and the task of this process."""

import abc
import os
from collections.abc import Mapping
from typing import Any, TypeAlias

from jaxdist import _devices
from jaxdist._called import called, name_call, refuse
from jaxdist._validate import as_integer, check_instance, log_without_effect
from jaxdist.cluster_resolver._cluster_spec import ClusterSpec
from jaxdist.errors import ClusterError


@called("num_accelerators")
def log_unused_arguments(config_proto: Any, task_type: Any = None, task_id: Any = None) -> None:
    """Log once which of the arguments passed to `num_accelerators` have no effect."""
    if config_proto is not None:
        log_without_effect("config_proto", "JAX has no sessions")
    for name, given in (("task_type", task_type), ("task_id", task_id)):
        if given is not None:
            log_without_effect(name, "all tasks have equally many")


class ClusterResolver(abc.ABC):
    """The base class of resolvers: the tasks of the cluster, and the task of this process.

    A subclass implements `cluster_spec` and `master`, and sets `task_type` and `task_id`.

    Example:
        >>> class Two(jaxdist.cluster_resolver.ClusterResolver):
        ...     def cluster_spec(self):
        ...         return jaxdist.cluster_resolver.ClusterSpec({"worker": ["a:1", "b:1"]})
        ...     def master(self, task_type=None, task_id=None, rpc_layer=None):
        ...         return ""
        >>> Two().cluster_spec().num_tasks("worker"), Two().task_id
        (2, None)

    Source:
        `tf.distribute.cluster_resolver.ClusterResolver`.
    """

    # Class attributes: a user's subclass need not call `super().__init__()`.
    _task_type: str | None = None
    _task_id: int | None = None

    @abc.abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """Return the tasks of the cluster."""

    @abc.abstractmethod
    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Return the address to connect to; empty for this process."""

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: Any = None,
    ) -> dict[str, int]:
        """Return the number of accelerators by kind, of one task or of all tasks.

        Args:
            task_type: The job; with `task_id` it selects one task.
            task_id: The number of the task, which is its process.
            config_proto: Settings of a TensorFlow session; no effect, since JAX has no sessions.
        """
        log_unused_arguments(config_proto)
        return _devices.chips.accelerators(None if task_type is None else task_id)

    @property
    def environment(self) -> str | None:
        """The environment of the cluster, for instance `google`; usually empty."""
        return ""

    def _describe_source(self) -> str:
        """Return where the tasks come from, for the first line of an error; "" if not known."""
        return ""

    def _find_task_type(self) -> str | None:
        """Return the job of this process if nobody has set it."""
        return None

    def _find_task_id(self) -> int | None:
        """Return the number of this process if nobody has set it."""
        return None

    @property
    def task_type(self) -> str | None:
        """The job of this process."""
        return self._find_task_type() if self._task_type is None else self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """The number of this process in its job."""
        return self._find_task_id() if self._task_id is None else self._task_id

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id


def read_environ(environ: Any) -> Mapping[str, str]:
    """Return the given environment, or that of this process."""
    if environ is None:
        return os.environ
    remedy = "Leave environ out: then it is the environment of this process."
    check_instance("environ", environ, Mapping, "a dict from strings to strings", remedy)
    return environ


@called(
    None,
    replaces="ClusterSpec.task_address",
    arguments={"job_name": "task_type", "task_index": "task_id"},
)
def find_master(
    spec: ClusterSpec,
    task: tuple[Any, Any],
    rpc_layer: str | None,
) -> str:
    """Return the address of `task` with its protocol; errors name the arguments of the caller."""
    return master_url(spec.task_address(*task), rpc_layer)


class ListingResolver(ClusterResolver):
    """The base class of resolvers of tasks that another program lists."""

    rpc_layer: str | None

    @called(lambda self: f"{type(self).__name__}.master")
    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Return the address of a task, by default of this process; empty if it is unknown."""
        check_task(task_type, task_id, rpc_layer)
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        if task_type is None or task_id is None:
            return ""
        return find_master(self.cluster_spec(), (task_type, task_id), rpc_layer or self.rpc_layer)


def check_task(task_type: Any, task_id: Any, rpc_layer: Any = None) -> None:
    """Raise if the job or protocol is not a string, or the task is not an integer of 0 or more.

    Each of them may be None.
    """
    for name, value in (("task_type", task_type), ("rpc_layer", rpc_layer)):
        if value is not None:
            remedy = f"Pass for instance {name}={'worker' if name == 'task_type' else 'grpc'!r}."
            check_instance(name, value, str, "a string or None", remedy)
    if task_id is not None:
        as_integer("task_id", task_id, least=0)


def master_url(address: str, rpc_layer: str | None) -> str:
    """Return `address` with the protocol as its prefix."""
    return f"{rpc_layer}://{address}" if rpc_layer and address else address


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
