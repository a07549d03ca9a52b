"""`ParameterServerStrategy`: variables on servers, functions on workers that are not in step."""

import inspect
import itertools
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import jax
import numpy as np

from jaxdist import _mesh
from jaxdist._parameter_server.closures.recent import Recent
from jaxdist._parameter_server.closures.server_optimizers import move_optimizers
from jaxdist._parameter_server.coordinator import ServerReport
from jaxdist._parameter_server.server import VariableServer
from jaxdist._parameter_server.strategy.cluster import read_cluster
from jaxdist._parameter_server.strategy.local_link import LocalWorkerLink
from jaxdist._parameter_server.strategy.prepare import Prepared, Preparer
from jaxdist._parameter_server.variables.make_shards import make_shards
from jaxdist._parameter_server.variables.server_variable import ServerVariable
from jaxdist._parameter_server.variables.servers import Servers
from jaxdist._parameter_server.variables.sharded import ShardedVariable
from jaxdist._parameter_server.worker.worker import Worker
from jaxdist._program import RunOptions
from jaxdist._strategies import Strategy
from jaxdist._validate import as_integer, check_call_arguments, check_callable, show
from jaxdist._values import Variable, current_binding, get_call_context
from jaxdist.errors import ArgumentError

_LOG = logging.getLogger("jaxdist")
_SIGNATURE = inspect.signature(Variable.__init__)


@final
class ParameterServerStrategy(Strategy):
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
        self._partitioner = variable_partitioner
        client = secrets.token_hex(8)
        local = jax.local_devices()
        self._set_up(_mesh.build(local[:1]))
        links = [
            VariableServer(f"ps:{n}", max_staleness=max_staleness) for n in range(len(cluster.ps))
        ]
        self.storage = Servers(links, client)
        self._fence = self.storage.fence
        self._cluster_coordinator: Any = None
        self._preparer = Preparer(self, move_optimizers)
        self._links = [
            LocalWorkerLink(n, self._make_worker(local[n % len(local)], max_staleness), client)
            for n in range(len(cluster.workers))
        ]
        # For `run` outside of scheduled functions, which has numbers of its own.
        worker = self._make_worker(local[0], max_staleness)
        self._local = LocalWorkerLink(-1, worker, f"{client}-coordinator")
        self._numbers = itertools.count(1)
        self._steps: Recent[Any, Callable[..., Any]] = Recent(64)
        self._has_warned = False

    def _make_worker(self, device: jax.Device, max_staleness: int | None) -> Worker:
        return Worker(self.storage, _Put(device), max_staleness)

    @property
    def cluster_resolver(self) -> Any:
        """The resolver that this strategy was made with."""
        return self._resolver

    # Variables

    def _create_variable(self, args: Any, kwargs: Any) -> Any:
        if self._partitioner is None:
            return object.__new__(ServerVariable)
        given = _SIGNATURE.bind(None, *args, **kwargs)
        given.apply_defaults()
        own = dict(given.arguments)
        del own["self"]
        name = own["name"] or "Variable"
        shards = make_shards(
            own["shape"], own["dtype"], self._partitioner, own.pop("initial_value"), name
        )
        if len(shards) == 1:
            return ServerVariable(shards[0].make_value(), **own)
        own["shape"] = None
        parts = [
            ServerVariable(shard.make_value(), **{**own, "name": f"{name}/part_{n}"})
            for n, shard in enumerate(shards)
        ]
        return ShardedVariable(parts, name=name)

    # Running on the coordinator

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Any:
        """Run `fn` on the replicas of the worker that runs the scheduled function around it.

        Outside of a scheduled function it runs in this process: it reads variables of the servers
        and sends its changes, as a worker does. A log line says once that no worker runs it.

        Args:
            fn: As for `Strategy.run`.
            args: As for `Strategy.run`.
            kwargs: As for `Strategy.run`.
            options: As for `Strategy.run`.

        Source:
            `tf.distribute.ParameterServerStrategy.run`.
        """
        if current_binding() is not None or get_call_context().in_step is not None:
            return super().run(fn, args, kwargs, options)
        check_call_arguments("strategy.run", args, kwargs)
        check_callable("strategy.run", fn)
        if not self._has_warned:
            self._has_warned = True
            _LOG.warning(
                "ParameterServerStrategy.run runs in this process and not on a worker. To use the "
                "workers, schedule a function that calls it: "
                "ClusterCoordinator(strategy).schedule(step, args)."
            )

        def make_step() -> Callable[..., Any]:
            def step(*args: Any, **kwargs: Any) -> Any:
                return super(ParameterServerStrategy, self).run(fn, args, kwargs, options)

            step.__name__ = getattr(fn, "__name__", "function")
            return step

        step = self._steps.find((fn, options), make_step)
        with self.scope():
            prepared = self._preparer.prepare(step, tuple(args), dict(kwargs or {}))
            number = next(self._numbers)
            return self._local.run(prepared, number, self._fence.value, number)

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


class _Put:
    """Puts arrays on one device."""

    def __init__(self, device: jax.Device) -> None:
        self._device = device

    def __call__(self, value: Any) -> Any:
        return jax.device_put(np.asarray(value), self._device)
