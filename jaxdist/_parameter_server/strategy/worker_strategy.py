"""`WorkerStrategy`: a strategy with parameter servers that each worker makes for itself."""

import dataclasses
import logging
import math
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.sharding import SingleDeviceSharding

from jaxdist import _mesh, data
from jaxdist._called import call_as, refuse
from jaxdist._cluster import Task
from jaxdist._devices import runtime
from jaxdist._parameter_server.coordinator import Backoff, read_wait_settings
from jaxdist._parameter_server.protocol import Hello
from jaxdist._parameter_server.server import VariableServer
from jaxdist._parameter_server.strategy.cluster import find_worker_devices, read_own_task
from jaxdist._parameter_server.strategy.links import Note, check_task
from jaxdist._parameter_server.strategy.losses import LossReport
from jaxdist._parameter_server.strategy.patient_server import PatientServer
from jaxdist._parameter_server.strategy.prepare import Prepared
from jaxdist._parameter_server.strategy.server_strategy import ServerStrategy
from jaxdist._parameter_server.strategy.tasks import wait_for_tasks
from jaxdist._parameter_server.strategy.worker_extended import WorkerExtended, name_task
from jaxdist._parameter_server.transport import Channel, connect
from jaxdist._parameter_server.variables.remote_server import Link
from jaxdist._parameter_server.variables.servers import Servers
from jaxdist._processes import get_settings
from jaxdist._program import RunOptions
from jaxdist._strategies import Strategy
from jaxdist._values import Variable
from jaxdist.cluster_resolver import ClusterResolver, choose_resolver
from jaxdist.errors import ClusterError, DeadlineExceededError, PSUnavailableError, UnsupportedError

_LOG = logging.getLogger("jaxdist")
_REPORT_SECONDS = 5.0


_LOCK_OF_SERVERS = threading.Lock()
_SERVERS: weakref.WeakValueDictionary[str, VariableServer] = weakref.WeakValueDictionary()


def find_servers_here(addresses: Sequence[str]) -> list[VariableServer]:
    """Return the servers of a job whose tasks are all in this process; make missing ones.

    The strategies of a job, one for each worker, find the same server at the same address. A server
    ends when the last strategy that uses it is deleted.
    """
    with _LOCK_OF_SERVERS:
        servers = []
        for number, address in enumerate(addresses):
            server = _SERVERS.get(address)
            if server is None:
                server = _SERVERS[address] = VariableServer(f"ps:{number}")
            servers.append(server)
        return servers


class WorkerServers(Servers):
    """The servers, as a worker uses them.

    All workers make the same variables in the same order, so the names and the servers of variables
    are the same in all of them. The chief's first values count: the others wait until it has made
    the variable, and then use it.

    Args:
        task: The worker.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        # Those that no one has waited for yet.
        self._channels: list[Channel] = []
        self._connecting = threading.Lock()
        links: list[Link] = []
        if task.is_local:
            links += find_servers_here(task.servers)
        else:
            named = enumerate(task.servers)
            self._channels += [connect(a, layer="grpc", name=f"ps {n}") for n, a in named]
            links += [PatientServer(channel, n) for n, channel in enumerate(self._channels)]
        super().__init__(links, secrets.token_hex(8))

    def _check_is_no_server(self, names: Sequence[str]) -> None:
        """Raise in a parameter server, which would wait for itself.

        Not when the strategy is made: `train_and_evaluate` gets one in every task, and lets the
        servers serve.
        """
        job, number = self._task.job, self._task.index
        if job == "ps":
            raise ClusterError(
                f"Variable {names[0]!r} was made in a process that is ps {number} of its cluster."
                "\n\nThe chief and the workers make variables. A parameter server serves, and runs "
                "no code of the training.\n\n"
                f"In this process call jaxdist.Server(cluster_spec, 'ps', {number}).join() before "
                f"that, or run `jaxdist server --type ps --index {number}`. If it is a worker, its "
                "TF_CONFIG has another task type."
            )

    def _wait_for_servers(self) -> None:
        """Wait until all servers answer."""
        with self._connecting:
            if not self._channels:
                return
            limit, name = get_settings().join_seconds, f"{self._task.job} {self._task.index}"
            numbered = enumerate(zip(self._task.servers, self._channels, strict=True))
            named = {f"ps {n} at {a}": channel for n, (a, channel) in numbered}
            missing = call_as(name, wait_for_tasks, named, limit)
            if missing:
                verb = "does" if len(missing) == 1 else "do"
                raise DeadlineExceededError(
                    f"{name} waited {limit:g} s (JAXDIST_JOIN_SECONDS), and {', '.join(missing)} "
                    f"{verb} not answer.\n\n"
                    "Variables are made on the parameter servers, which have to answer first.\n\n"
                    "Start them: `jaxdist server` in each, or jaxdist.Server("
                    "resolver.cluster_spec(), resolver.task_type, resolver.task_id).join()."
                )
            for number, address in enumerate(self._task.servers):
                found = self.links[number].call(Hello())
                check_task(address, f"ps:{number}", found.task)
            self._channels.clear()

    def _before_creation(self, place: int, names: Sequence[str]) -> None:
        self._check_is_no_server(names)
        self._wait_for_servers()
        if self._task.is_chief:
            return
        began, backoff = time.monotonic(), Backoff(0.005, 0.2)
        limit, report = get_settings().join_seconds, _REPORT_SECONDS
        while missing := set(names) - set(self.links[place].call(Hello()).versions):
            waited = time.monotonic() - began
            if waited > limit:
                raise DeadlineExceededError(
                    f"{self._task.job} {self._task.index} waited {waited:.0f} s "
                    f"(JAXDIST_JOIN_SECONDS) for the chief to make {sorted(missing)[0]!r} on ps "
                    f"{place}.\n\n"
                    "Every worker makes the same variables in the same order, and the chief's "
                    "first values count. The chief is the task of the job 'chief', or worker 0.\n\n"
                    "Start the chief, and let it run the same script."
                )
            if waited > report:
                report = math.inf
                _LOG.warning(
                    "%s %d waits for the chief to make %s.",
                    self._task.job,
                    self._task.index,
                    sorted(missing)[0],
                )
            time.sleep(backoff.find_next())


_PAUSE = 0.1


class WorkerStrategy(ServerStrategy):
    """A strategy of one worker; each worker process runs the same script and makes its own.

    Note [Workers without a coordinator]
    All workers make the same variables in the same order. So the n-th variable has the same name
    and the same server in each of them, and no worker has to tell another one where it is.

    Args:
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
