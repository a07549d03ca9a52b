"""`MultiWorkerMirroredStrategy`, and its experimental name."""

import logging
import os
import warnings
from typing import Any, final

import jax

from jaxdist import _mesh as meshes
from jaxdist import _processes
from jaxdist._called import called
from jaxdist._cluster import find_task
from jaxdist._collectives import (
    CommunicationImplementation,
    CommunicationOptions,
    read_communication,
)
from jaxdist._devices import runtime
from jaxdist._strategies.base import Strategy
from jaxdist._strategies.deterministic import add_virtual_replicas, check_no_ops_with_deterministic
from jaxdist._strategies.over_processes import check_one_process, warn_if_alone
from jaxdist._validate import check_instance
from jaxdist.cluster_resolver import (
    ClusterResolver,
    choose_resolver,
    describe_unused_sign,
    find_source,
)
from jaxdist.errors import ClusterError
from jaxdist.tpu import is_reordered, order_cores, system_of

_LOG = logging.getLogger("jaxdist")
_CALLER = "MultiWorkerMirroredStrategy"


@final
class MultiWorkerMirroredStrategy(Strategy):
    """A replica on each device of every process of a job; state is equal on all of them.

    Every process runs the same program and makes this strategy first, before it uses a device. The
    processes then meet, and their devices form one mesh. Each method means what it means in one
    process with as many devices: `run` splits global batches over all replicas, `reduce` and
    `gather` give their results to every process.

    The processes are the chief, if there is one, and the workers. An evaluator, and a program
    without a cluster, work alone with the devices of their own process.

    Cost:
        The constructor waits until all processes have joined.

    Args:
        cluster_resolver: The cluster. None takes the first of these that exists: `TF_CONFIG`, the
            cluster that `JAXDIST_CLUSTER` names (`none`: this process alone), a Slurm step with
            several tasks, a TPU pod with several hosts. `jaxdist resolve` shows which. If none
            exists, the process works alone.
        communication_options: Default `experimental.CommunicationOptions` of calls that pass none.
        cross_device_ops: As for `MirroredStrategy`: the implementation of reductions, such as
            `contrib.MultiWorkerAllReduce`; None is XLA. If it looks at devices itself, call
            `config.experimental_connect_to_cluster(cluster_resolver)` before you make it.
        deterministic: As for `MirroredStrategy`: the same bits for any number of processes.

    Raises:
        ArgumentTypeError: `cluster_resolver` is not a `ClusterResolver`.
        ClusterError: A cluster that is not valid, processes that do not join in time, or a task of
            the type `ps`, which takes no part in an all-reduce.
        BackendStartedError: JAX has already used the devices of this process.
        ArgumentError: `cross_device_ops` with `deterministic`, or virtual replicas that the devices
            do not divide.

    Example:
        >>> strategy = MultiWorkerMirroredStrategy()  # without a cluster: this process alone
        >>> strategy.num_replicas_in_sync
        8

    Source:
        `tf.distribute.MultiWorkerMirroredStrategy`, which reads `TF_CONFIG` only.
    """

    @called(_CALLER)
    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        communication_options: Any = None,
        *,
        cross_device_ops: Any = None,
        deterministic: bool | int = False,
    ) -> None:
        resolver = _choose_and_log() if cluster_resolver is None else cluster_resolver
        check_instance(
            "cluster_resolver",
            resolver,
            ClusterResolver,
            "a jaxdist.cluster_resolver.ClusterResolver",
            "Set TF_CONFIG and leave it out, or pass for instance SlurmClusterResolver().",
        )
        communication = read_communication(
            cross_device_ops, communication_options, None, "communication_options"
        )
        check_no_ops_with_deterministic(cross_device_ops, deterministic)
        has_joined = _join(resolver)
        if has_joined:
            layout = meshes.build(_list_devices_of_all())
        else:
            layout = meshes.build(runtime.default_devices())
            if layout.process.count > 1:
                warn_if_alone(layout)
            else:
                check_one_process(layout, were_chosen=True)
        self._resolver = resolver
        self._set_up(add_virtual_replicas(layout, deterministic), communication)

    @property
    def cluster_resolver(self) -> ClusterResolver:
        """The resolver of the cluster.

        Example:
            >>> MultiWorkerMirroredStrategy().cluster_resolver.task_type is None
            True
        """
        return self._resolver


def _choose_and_log() -> ClusterResolver:
    """Return the resolver that fits the environment, and log where it was found."""
    source = find_source(os.environ)
    if source.because:
        _LOG.info("%s reads the cluster from %s (%s).", _CALLER, source.name, source.because)
    elif sign := describe_unused_sign(os.environ):
        _LOG.warning("%s: %s", _CALLER, sign)
    return choose_resolver()


def _join(resolver: ClusterResolver) -> bool:
    """Join the processes of the cluster; return whether this process trains with others."""
    task = find_task(resolver)
    if task.job == "ps":
        raise ClusterError(
            f"{_CALLER} was made in the task 'ps' {task.index}.\n\n"
            "Its replicas are on the chief and the workers; a parameter server takes no part in an "
            "all-reduce.\n\n"
            "Start `jaxdist server` in this task, or leave the job 'ps' out of the cluster."
        )
    if task.number is None or task.is_alone:
        # An evaluator, a cluster of one task, or no cluster.
        return False
    _processes.join(list(task.training.values()), task.number)
    return True


def _list_devices_of_all() -> list[jax.Device]:
    """Return the devices of all processes in the order of replicas: process by process.

    On some TPU slices the order is different; see Note [Order of chips].
    """
    devices = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
    if devices[0].platform != "tpu":
        return devices
    system = system_of("", _CALLER)
    if not is_reordered(system.topology, system.num_slices):
        return devices
    order = order_cores(system.topology, system.num_slices)
    return [system.device_at(place) for place in order.tolist()]


class _NameOfNewer(type):
    """Objects of the newer class count as objects of this one."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, MultiWorkerMirroredStrategy)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, MultiWorkerMirroredStrategy)


class ExperimentalMultiWorkerMirroredStrategy(metaclass=_NameOfNewer):
    """Make a `jaxdist.MultiWorkerMirroredStrategy`; this name is deprecated.

    Args:
        communication: A `CommunicationImplementation`, as `implementation` of
            `CommunicationOptions`.
        cluster_resolver: The cluster; None reads `TF_CONFIG`.

    Raises:
        Everything that `jaxdist.MultiWorkerMirroredStrategy` raises.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore")
        ...     strategy = jaxdist.experimental.MultiWorkerMirroredStrategy()
        >>> isinstance(strategy, jaxdist.MultiWorkerMirroredStrategy)
        True

    Source:
        `tf.distribute.experimental.MultiWorkerMirroredStrategy`.
    """

    @called("experimental.MultiWorkerMirroredStrategy")
    def __new__(  # type: ignore[misc]
        cls,
        communication: CommunicationImplementation = CommunicationImplementation.AUTO,
        cluster_resolver: ClusterResolver | None = None,
    ) -> MultiWorkerMirroredStrategy:
        """Return an object of the newer class."""
        caller = "experimental.MultiWorkerMirroredStrategy"
        check_communication(communication)
        warnings.warn(
            f"jaxdist.{caller} is deprecated; use jaxdist.MultiWorkerMirroredStrategy("
            "communication_options=CommunicationOptions(implementation=...)).",
            DeprecationWarning,
            stacklevel=2,
        )
        options = CommunicationOptions(implementation=communication)
        return MultiWorkerMirroredStrategy(cluster_resolver, options)


def check_communication(communication: Any) -> None:
    """Check the type of `communication`.

    Raises:
        ArgumentTypeError: `communication` is not a `CommunicationImplementation`.
    """
    check_instance(
        "communication",
        communication,
        CommunicationImplementation,
        "a jaxdist.experimental.CommunicationImplementation",
        "Pass CommunicationImplementation.AUTO, or leave it out.",
    )


# The name that users import.
ExperimentalMultiWorkerMirroredStrategy.__name__ = "MultiWorkerMirroredStrategy"
ExperimentalMultiWorkerMirroredStrategy.__qualname__ = "MultiWorkerMirroredStrategy"
