"""`ParameterServerStrategy`: variables on servers, functions on workers that are not in step."""

import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import jax

from jaxdist import _mesh
from jaxdist._parameter_server.coordinator import ServerReport
from jaxdist._parameter_server.server import VariableServer
from jaxdist._parameter_server.strategy.cluster import read_cluster
from jaxdist._parameter_server.strategy.direct_reading import check_on_worker
from jaxdist._parameter_server.strategy.local_link import LocalWorkerLink
from jaxdist._parameter_server.strategy.prepare import Prepared
from jaxdist._parameter_server.strategy.server_extended import ServerExtended
from jaxdist._parameter_server.strategy.server_strategy import PutOn, ServerStrategy
from jaxdist._parameter_server.variables.servers import Servers
from jaxdist._parameter_server.worker.worker import Worker
from jaxdist._validate import as_integer, show
from jaxdist.errors import ArgumentError

_LOG = logging.getLogger("jaxdist")


@final
class ParameterServerStrategy(ServerStrategy):
    """Variables on parameter servers; a coordinator gives functions to workers.

    Each function runs on one worker. It reads variables, computes, and sends changes, which the
    servers apply at once; no worker waits for another one.

    Args:
        cluster_resolver: The tasks: `ps` and `worker`, and this process as `chief`. With
            `rpc_layer="local"` all tasks are in this process.
        variable_partitioner: Which variables are cut into shards, such as
            `jaxdist.experimental.partitioners.MinSizePartitioner()`; None cuts none.
        max_staleness: How many changes of a variable may come between a worker's read and its own
            change of it; a worker that is too far ahead waits. None means any number.

    Raises:
        ClusterError: The cluster has no servers or no workers, or other jobs.
        ArgumentTypeError: `cluster_resolver` is no resolver.

    Source:
        `tf.distribute.ParameterServerStrategy`.
    """

    _check_next = staticmethod(check_on_worker)

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
        local = jax.local_devices()
        servers = [
            VariableServer(f"ps:{n}", max_staleness=max_staleness) for n in range(len(cluster.ps))
        ]
        self._set_up_servers(
            "ClusterCoordinator.schedule",
            _mesh.build(local[:1]),
            Servers(servers, client),
            variable_partitioner,
            max_staleness,
        )
        self._extended = ServerExtended(self)
        self._cluster_coordinator: Any = None
        self._has_warned = False
        layouts = [_mesh.build([local[n % len(local)]]) for n in range(len(cluster.workers))]
        workers = [Worker(self.storage, PutOn(layout), max_staleness) for layout in layouts]
        self._links = [LocalWorkerLink(n, w, client) for n, w in enumerate(workers)]

    @property
    def cluster_resolver(self) -> Any:
        """The resolver that this strategy was made with."""
        return self._resolver

    def _before_run_here(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            _LOG.warning(
                "ParameterServerStrategy.run runs in this process and not on a worker. To use the "
                "workers, schedule a function that calls it: "
                "ClusterCoordinator(strategy).schedule(step, args)."
            )

    # What the coordinator needs

    def links(self) -> Sequence[LocalWorkerLink]:
        """Return the connections to the workers."""
        return self._links

    def prepare(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Prepared:
        """Trace a function with its arguments."""
        return self._preparer.prepare(fn, args, kwargs)

    def make_per_worker(self, dataset_or_fn: Any) -> Any:
        """Check a dataset or a function that returns one."""
        if callable(dataset_or_fn) or hasattr(dataset_or_fn, "__iter__"):
            return dataset_or_fn
        raise ArgumentError(
            f"ClusterCoordinator.create_per_worker_dataset was given {show(dataset_or_fn)}.\n\n"
            "It is a function without arguments that returns a dataset, or a dataset.\n\n"
            "Pass for instance lambda: jaxdist.data.batches(x, 32)."
        )

    def report_of_servers(self) -> ServerReport:
        """Return what the servers have counted."""
        staleness: dict[int, int] = {}
        for link in self.storage.links:
            for late, count in link.statistics()["staleness"].items():
                staleness[int(late)] = staleness.get(int(late), 0) + count
        return ServerReport(staleness)
