"""`WorkerStrategy`: a strategy with parameter servers, of which each worker has its own."""

import dataclasses
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.sharding import SingleDeviceSharding

from jaxdist import _mesh, data
from jaxdist._called import call_as, refuse
from jaxdist._cluster import Task
from jaxdist._devices import runtime
from jaxdist._parameter_server.coordinator import read_wait_settings
from jaxdist._parameter_server.strategy.cluster import read_own_task
from jaxdist._parameter_server.strategy.local_link import Note
from jaxdist._parameter_server.strategy.losses import LossReport
from jaxdist._parameter_server.strategy.prepare import Prepared
from jaxdist._parameter_server.strategy.server_strategy import ServerStrategy
from jaxdist._parameter_server.strategy.version_1.worker_extended import WorkerExtended, name_task
from jaxdist._parameter_server.strategy.version_1.worker_servers import WorkerServers
from jaxdist._parameter_server.strategy.worker_devices import find_worker_devices
from jaxdist._program import RunOptions
from jaxdist._strategies import Strategy
from jaxdist._values import Variable
from jaxdist.cluster_resolver import ClusterResolver, choose_resolver
from jaxdist.errors import ClusterError, PSUnavailableError, UnsupportedError

_PAUSE = 0.1


class WorkerStrategy(ServerStrategy):
    """A strategy of one worker; each worker process runs the same script and makes its own.

    Note [Workers without a coordinator]
    All workers make the same variables in the same order. So the n-th variable has the same name
    and the same server in each of them, and no worker has to tell another one where it is.

    Args:
        caller: The name of the strategy, for errors.
        resolver: The cluster, and which task of it this process is; None is that of the
            environment (`cluster_resolver.choose_resolver`).
    """

    _task: Task | None

    def _set_up_worker(self, resolver: ClusterResolver | None) -> None:
        resolver = choose_resolver() if resolver is None else resolver
        self._resolver = resolver
        self._task = task = read_own_task(resolver)
        # Nobody connects an evaluator with the servers: it has variables of its own, which it
        # restores from checkpoints.
        self._is_alone = task is None or task.job == "evaluator"
        self._has_servers = not self._is_alone
        if task is None or self._is_alone or not task.is_local or task.number is None:
            devices = find_worker_devices(resolver)
        else:
            devices = find_worker_devices(resolver, task.number, len(task.training))
        layout = _mesh.build(devices)
        if task is None or self._is_alone:
            here = devices[0] if len(devices) == 1 else runtime.local_devices("cpu")[0]
            on = SingleDeviceSharding(here)
            self._set_up(dataclasses.replace(layout, variables_on=on))
        else:
            servers = WorkerServers(task)
            call_as("strategy.run", self._set_up_servers, layout, servers)
            # At the end of the process nobody waits for the servers.
            ending = weakref.finalize(self, servers.close)
            ending.atexit = False  # pyrefly: ignore[missing-attribute]
        self._extended = WorkerExtended(self, task)

    @property
    def worker_number(self) -> int:
        """The number of this process among those that read input."""
        return 0 if self._task is None else self._task.number or 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if not self._is_alone:
            super().__deepcopy__(memo)
        memo[id(self)] = other = object.__new__(type(self))
        call_as(type(self).__name__, other._set_up_worker, self._resolver)
        return other

    @property
    def cluster_resolver(self) -> ClusterResolver:
        """The resolver of the cluster.

        Example:
            >>> strategy = jaxdist.compat.v1.experimental.ParameterServerStrategy()
            >>> strategy.cluster_resolver.task_type is None
            True
        """
        return self._resolver

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
        *more: Any,
    ) -> Any:
        """Run `fn` on the replicas of this worker, which are in step with each other only.

        It reads the variables of the servers, computes, and sends its changes. The values that it
        computes with may be as old as the end of this worker's step before, if it begins at once.

        Cost:
            One exchange with each server that `fn` changes variables of.

        Args:
            fn: As for `Strategy.run`.
            args: As for `Strategy.run`. NNX models and optimizers move to the servers.
            kwargs: As for `Strategy.run`.
            options: As for `Strategy.run`.
            *more: As for `Strategy.run`.

        Source:
            `tf.compat.v1.distribute.experimental.ParameterServerStrategy.run`.
        """
        if self._is_alone:
            return Strategy.run(self, fn, args, kwargs, options, *more)
        return super().run(fn, args, kwargs, options, *more)

    def _run_here(self, prepared: Prepared, number: int) -> Any:
        began, limit = time.monotonic(), read_wait_settings().server_seconds
        while True:
            try:
                return super()._run_here(prepared, number)
            except PSUnavailableError:
                # It may come back with its snapshot. A server that has counted this step does not
                # count it again.
                if time.monotonic() - began > limit:
                    raise
            self._fence.advance()
            time.sleep(_PAUSE)

    def _make_note(self, client: str) -> Note:
        return LossReport(self.storage, client, "steps of this worker").note

    def _create_variable(self, args: Any, kwargs: Any) -> Any:
        if self._is_alone:
            return object.__new__(Variable)
        return super()._create_variable(args, kwargs)

    def _adapt_dataset_fn(
        self, dataset_fn: Callable[[data.InputContext], Any], options: data.InputOptions
    ) -> Callable[[data.InputContext], Any]:
        name, task = type(self).__name__, self._task
        if options.is_per_replica:
            raise call_as(
                f"{name}.distribute_datasets_from_function",
                refuse,
                "InputReplicationMode.PER_REPLICA.",
                "A worker reads one dataset, whose batches go to its replicas in turn.",
                "Leave experimental_replication_mode out.",
                kind=UnsupportedError,
            )
        if task is None or self._is_alone:
            return dataset_fn
        if task.number is None:
            raise ClusterError(
                f"{name} was asked for input in {name_task(task)}.\n\n"
                "A parameter server holds variables; workers, the chief and the evaluator read "
                "input.\n\n"
                "Let this process run a server: jaxdist.Server(...).join()."
            )
        context = data.InputContext(len(task.training), task.number, self.num_replicas_in_sync)
        return lambda _: dataset_fn(context)
