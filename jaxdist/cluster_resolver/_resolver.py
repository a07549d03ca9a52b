"""`ClusterResolver`, the base class: the tasks of a cluster, and the task of this process."""

import abc
import os
from collections.abc import Mapping
from typing import Any

from jaxdist import _devices
from jaxdist._called import called, name_call
from jaxdist._validate import CallerRename, as_integer, check_instance, log_without_effect
from jaxdist.cluster_resolver._cluster_spec import ClusterSpec


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

    @property
    def task_type(self) -> str | None:
        """The job of this process."""
        return self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """The number of this process in its job."""
        return self._task_id

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id


def read_environ(environ: Any) -> Mapping[str, str]:
    """Return the given environment, or that of this process."""
    if environ is None:
        return os.environ
    remedy = "Leave environ out: then it is the environment of this process."
    check_instance("environ", environ, Mapping, "a dict from texts to texts", remedy)
    return environ


def find_master(
    spec: ClusterSpec,
    task: tuple[Any, Any],
    rpc_layer: str | None,
) -> str:
    """Return the address of `task` with its protocol; errors name the arguments of `caller`."""
    caller = name_call()
    inner = "ClusterSpec.task_address was given"
    with (
        CallerRename(f"{inner} job_name", f"{caller} was given task_type"),
        CallerRename(f"{inner} task_index", f"{caller} was given task_id"),
    ):
        return master_url(spec.task_address(*task), rpc_layer)


def find_own_master(resolver: Any, task_type: Any, task_id: Any, rpc_layer: Any) -> str:
    """Return the address of a task, by default of this process; empty if it is unknown."""
    check_task(task_type, task_id, rpc_layer)
    task_type = resolver.task_type if task_type is None else task_type
    task_id = resolver.task_id if task_id is None else task_id
    if task_type is None or task_id is None:
        return ""
    layer = rpc_layer or resolver.rpc_layer
    return find_master(resolver.cluster_spec(), (task_type, task_id), layer)


def check_task(task_type: Any, task_id: Any, rpc_layer: Any = None) -> None:
    """Raise if the job or protocol is not a string, or the task is not an integer of 0 or more.

    Each of them may be None.
    """
    for name, value in (("task_type", task_type), ("rpc_layer", rpc_layer)):
        if value is not None:
            remedy = f"Pass for instance {name}={'worker' if name == 'task_type' else 'grpc'!r}."
            check_instance(name, value, str, "a text or None", remedy)
    if task_id is not None:
        as_integer("task_id", task_id, least=0)


def master_url(address: str, rpc_layer: str | None) -> str:
    """Return `address` with the protocol as its prefix."""
    return f"{rpc_layer}://{address}" if rpc_layer and address else address
