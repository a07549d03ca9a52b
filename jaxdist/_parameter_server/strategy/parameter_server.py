"""`ParameterServerStrategy`: variables on servers, functions on workers that are not in step."""

import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from jaxdist._parameter_server.coordinator import ServerReport, WorkerLink
from jaxdist._parameter_server.strategy.cluster import read_cluster
from jaxdist._parameter_server.strategy.direct_reading import check_on_worker
from jaxdist._parameter_server.strategy.links import LocalTasks, RemoteTasks, Tasks
from jaxdist._parameter_server.strategy.prepare import Prepared
from jaxdist._parameter_server.strategy.server_extended import ServerExtended
from jaxdist._parameter_server.strategy.server_strategy import ServerStrategy
from jaxdist._parameter_server.strategy.worker_devices import find_worker_layouts
from jaxdist._validate import as_integer, show
from jaxdist.errors import ArgumentError

_LOG = logging.getLogger("jaxdist")


@final
class ParameterServerStrategy(ServerStrategy):
    """Variables on parameter servers; a coordinator gives functions to workers.

    Each function runs on one worker. It reads variables, computes, and sends changes, which the
    servers apply at once; no worker waits for another one.

    Args:
        cluster_resolver: The tasks: `ps` and `worker`, and this process as `chief`. The others run
            `jaxdist.Server`, and are waited for. With `rpc_layer="local"` all tasks are in this
            process; `num_accelerators` is then the number of replicas of each worker, and without
            it they are the accelerators of the worker, or one CPU device.
        variable_partitioner: Which variables are cut into shards, such as
            `jaxdist.experimental.partitioners.MinSizePartitioner()`; None cuts none.
        max_staleness: How many changes of a variable may come between a worker's read and its own
            change of it; a worker that is too far ahead waits. None means any number.

    Raises:
        ClusterError: The cluster has no servers or no workers, or other jobs.
        ArgumentTypeError: `cluster_resolver` is no resolver.
        DeadlineExceededError: Tasks do not answer within `JAXDIST_JOIN_SECONDS`.
        UnauthenticatedError: A task has another secret.

    Source:
        `tf.distribute.ParameterServerStrategy`.
    """

    def __init__(
        self,
        cluster_resolver: Any,
        variable_partitioner: Callable[..., Sequence[int]] | None = None,
        *,
        max_staleness: int | None = None,
    ) -> None:
        caller = "ParameterServerStrategy"
        cluster = read_cluster(caller, cluster_resolver)
        if max_staleness is not None:
            as_integer(caller, "max_staleness", max_staleness, least=0)
        self._resolver = cluster_resolver
        client = secrets.token_hex(8)
        layouts = find_worker_layouts(caller, cluster_resolver, len(cluster.workers))
        self._tasks: Tasks = (
            LocalTasks(cluster, client, max_staleness, layouts)
            if cluster.is_local
            else RemoteTasks(caller, cluster, client, max_staleness)
        )
        self._set_up_servers(
            "ClusterCoordinator.schedule",
            layouts[0],
            self._tasks.storage,
            variable_partitioner,
            max_staleness,
        )
        self._extended = ServerExtended(self)
        self._cluster_coordinator: Any = None
        self.warns_of_runs_here = True
        self._reads_here = False

    def allow_work_here(self) -> None:
        """Let this process run steps and read batches: a job does so on purpose, to evaluate."""
        self.warns_of_runs_here = False
        self._reads_here = True

    def _check_next(self) -> None:
        if self._reads_here:
            super()._check_next()
        else:
            check_on_worker()

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

    # What the coordinator needs

    def links(self) -> Sequence[WorkerLink]:
        """Return the connections to the workers."""
        return self._tasks.links

    def prepare(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Prepared:
        """Trace a function with its arguments."""
        prepared = self._preparer.prepare(fn, args, kwargs)
        self.storage.save_new()
        return prepared

    def make_per_worker(self, dataset_or_fn: Any) -> Any:
        """Check a dataset or a function that returns one."""
        if callable(dataset_or_fn) or hasattr(dataset_or_fn, "__iter__"):
            self._tasks.check_dataset(dataset_or_fn)
            return dataset_or_fn
        raise ArgumentError(
            f"ClusterCoordinator.create_per_worker_dataset was given {show(dataset_or_fn)}.\n\n"
            "It is a function without arguments that returns a dataset, or a dataset.\n\n"
            "Pass for instance lambda: jaxdist.data.batches(x, 32)."
        )

    def report_of_servers(self) -> ServerReport:
        """Return what the servers have counted."""
        return self._tasks.report()
