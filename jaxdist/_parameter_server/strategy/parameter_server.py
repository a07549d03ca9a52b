"""`ParameterServerStrategy`: variables on servers, functions on workers that are not in step."""

import contextlib
import inspect
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from jaxdist._called import call_as, called, refuse
from jaxdist._mesh import ReplicaMesh
from jaxdist._parameter_server.coordinator import (
    Joining,
    ServerReport,
    WorkerLink,
    check_on_worker,
)
from jaxdist._parameter_server.strategy.cluster import (
    check_is_coordinator,
    find_layout_of_new_worker,
    find_worker_layouts,
    read_cluster,
)
from jaxdist._parameter_server.strategy.links import Note
from jaxdist._parameter_server.strategy.prepare import Prepared, Preparer
from jaxdist._parameter_server.strategy.server_strategy import ServerStrategy
from jaxdist._parameter_server.strategy.tasks import LocalTasks, RemoteTasks
from jaxdist._parameter_server.variables.server_variable import ServerVariable
from jaxdist._strategies import StrategyExtended
from jaxdist._validate import as_integer, check_callable, show
from jaxdist._values import Variable

# Iterable, but never a dataset.
_NO_DATASETS: tuple[type, ...] = (str, bytes, dict)
_LOG = logging.getLogger("jaxdist")


def _require_first(initialize: Callable[..., None]) -> inspect.Signature:
    """Return the signature of a class whose first argument has no default."""
    _, first, *rest = inspect.signature(initialize).parameters.values()
    return inspect.Signature([first.replace(default=inspect.Parameter.empty), *rest])


@final
class ParameterServerStrategy(ServerStrategy):
    """Variables on parameter servers; a coordinator gives functions to workers.

    Each function runs on one worker. It reads variables, computes, and sends changes, which the
    servers apply at once; no worker waits for another one.

    Args:
        cluster_resolver: The tasks, which must be given: `ps` and `worker`, and this process as
            `chief`. The others run `jaxdist.Server`, and are waited for. With `rpc_layer="local"`
            all tasks are in this process; `num_accelerators` is then the number of replicas of each
            worker, and without it they are the accelerators of the worker, or one CPU device.
        variable_partitioner: Which variables are cut into shards, such as
            `jaxdist.experimental.partitioners.MinSizePartitioner()`; None cuts none.
        max_staleness: How many changes of a variable may come between a worker's read and its own
            change of it; a worker that is too far ahead waits. None means any number.

    Raises:
        ClusterError: The cluster has no servers or no workers, or other jobs, or this process is
            one of them.
        ArgumentTypeError: `cluster_resolver` is not a resolver, or was not given.
        DeadlineExceededError: Tasks do not answer within `JAXDIST_JOIN_SECONDS`.
        UnauthenticatedError: A task has another secret.

    Example:
        >>> from jaxdist.cluster_resolver import ClusterSpec, SimpleClusterResolver
        >>> cluster = ClusterSpec({"worker": ["w:1", "w:2"], "ps": ["p:1"]})
        >>> strategy = jaxdist.ParameterServerStrategy(
        ...     SimpleClusterResolver(cluster, rpc_layer="local"))
        >>> coordinator = jaxdist.coordinator.ClusterCoordinator(strategy)
        >>> with strategy.scope():
        ...     total = jaxdist.Variable(0.0)
        >>> for x in range(4):
        ...     _ = coordinator.schedule(lambda x: total.assign_add(x), (np.float32(x),))
        >>> coordinator.join()
        >>> float(total)
        6.0

    Source:
        `tf.distribute.ParameterServerStrategy`.
    """

    @property
    def _check_next(self) -> Callable[..., None]:
        return super()._check_next if self._may_read_here else check_on_worker

    @called("ParameterServerStrategy")
    def __init__(
        self,
        cluster_resolver: Any = None,
        variable_partitioner: Callable[..., Sequence[int]] | None = None,
        *,
        max_staleness: int | None = None,
    ) -> None:
        cluster = read_cluster(cluster_resolver)
        check_is_coordinator(cluster)
        if variable_partitioner is not None:
            check_callable(variable_partitioner, "variable_partitioner")
        if max_staleness is not None:
            as_integer("max_staleness", max_staleness, least=0)
        self._resolver = cluster_resolver
        client = secrets.token_hex(8)
        layouts = find_worker_layouts(cluster_resolver, len(cluster.workers))
        self._tasks: LocalTasks | RemoteTasks = (
            LocalTasks(
                cluster,
                client,
                max_staleness,
                layouts,
                lambda n: find_layout_of_new_worker(cluster_resolver, n, layouts[0]),
            )
            if cluster.is_local
            else RemoteTasks(cluster, client, max_staleness)
        )
        call_as(
            "ClusterCoordinator.schedule",
            self._set_up_servers,
            layouts[0],
            self._tasks.storage,
            variable_partitioner,
            max_staleness,
        )
        self._preparer = call_as("ClusterCoordinator.schedule", Preparer, self)
        self._extended = ServerExtended(self)
        # Whether this process may read batches of its own datasets.
        self._may_read_here = False
        self._cluster_coordinator: Any = None
        self.warns_of_runs_here = True

    def _allow_work_here(self) -> None:
        """Let this process run steps and read batches: a job does so on purpose, to evaluate."""
        self.warns_of_runs_here = False
        self._may_read_here = True

    # Required; the default exists only to raise our own error.
    __signature__ = _require_first(__init__)

    @property
    def cluster_resolver(self) -> Any:
        """The resolver that this strategy was made with."""
        return self._resolver

    def _before_run_here(self) -> None:
        if self.warns_of_runs_here:
            self.warns_of_runs_here = False
            _LOG.warning(
                "ParameterServerStrategy.run runs in this process and not on a worker. To use the "
                "workers, schedule a function that calls it: "
                "ClusterCoordinator(strategy).schedule(step, args)."
            )

    def _make_note(self, client: str) -> Note:
        # The connections to the servers note it.
        self._tasks.watch(client)
        return super()._make_note(client)

    # What the coordinator needs

    def links(self) -> Sequence[WorkerLink]:
        """Return the connections to the workers."""
        return self._tasks.links

    def joining(self) -> Joining:
        """Return what adds workers."""
        return self._tasks.joining

    def prepare(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Prepared:
        """Trace a function with its arguments."""
        prepared = self._preparer.prepare(fn, args, kwargs)
        self.storage.save_new()
        return prepared

    @called("ClusterCoordinator.create_per_worker_dataset")
    def make_per_worker(self, dataset_or_fn: Any) -> Any:
        """Check a dataset or a function that returns one."""
        is_other = isinstance(dataset_or_fn, _NO_DATASETS)
        is_dataset = hasattr(dataset_or_fn, "__iter__") and not is_other
        if callable(dataset_or_fn) or is_dataset:
            self._tasks.check_dataset(dataset_or_fn)
            return dataset_or_fn
        raise refuse(
            f"dataset_fn={show(dataset_or_fn)}.",
            "It is a dataset, or a function without arguments that returns one.",
            "Pass for instance lambda: jaxdist.data.batches(x, 32).",
        )

    def report_of_servers(self) -> ServerReport:
        """Return what the servers have counted."""
        return self._tasks.report()


class ServerExtended(StrategyExtended):
    """The `extended` of a `ParameterServerStrategy`.

    Source:
        `tf.distribute.StrategyExtended`.
    """

    __slots__ = ()

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """Names of the devices of one worker, without the worker: any may run a function."""
        layout: ReplicaMesh = self._strategy.layout
        return tuple(f"/device:{d.platform.upper()}:{n}" for n, d in enumerate(layout.devices))

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The device on which the coordinator reads variables, as in TensorFlow."""
        return ("/job:chief/replica:0/task:0/device:CPU:0",)

    def _place_with(self, variable: Variable) -> contextlib.AbstractContextManager[None]:
        is_remote = isinstance(variable, ServerVariable)
        return variable.place_new_here() if is_remote else contextlib.nullcontext()
