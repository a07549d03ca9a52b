"""The servers and workers of a strategy: in this process, or as other tasks."""

import logging
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from jaxdist._called import called, name_call
from jaxdist._cluster import Task
from jaxdist._mesh import ReplicaMesh
from jaxdist._parameter_server.coordinator import ServerReport
from jaxdist._parameter_server.protocol import Configure, GetStatistics, Hello
from jaxdist._parameter_server.server import VariableServer
from jaxdist._parameter_server.strategy.joining import LocalJoining, RemoteJoining
from jaxdist._parameter_server.strategy.links import LocalWorkerLink, RemoteWorkerLink, check_task
from jaxdist._parameter_server.strategy.losses import LossReport
from jaxdist._parameter_server.strategy.patient_server import PatientServer
from jaxdist._parameter_server.transport import Channel, connect
from jaxdist._parameter_server.variables.servers import Servers
from jaxdist._parameter_server.worker.devices import find_platform
from jaxdist._parameter_server.worker.functions import list_names
from jaxdist._parameter_server.worker.worker import Worker
from jaxdist._parameter_server.worker_protocol import HelloWorker
from jaxdist._processes import get_settings
from jaxdist._validate import format_lines
from jaxdist.errors import DeadlineExceededError, WorkerUnavailableError

_LOG = logging.getLogger("jaxdist")
# A task that imports JAX takes about 3 s.
_FIRST_REPORT_SECONDS = 5.0
_NEXT_REPORT_SECONDS = 60.0
_PAUSE = 0.05


def wait_for_tasks(channels: Mapping[str, Channel], seconds: float) -> list[str]:
    """Wait until all tasks answer, and log which of them do not.

    Args:
        channels: The channel to each task, by what the log calls it: `ps 0 at 10.0.0.1:7000`.
        seconds: How long to wait at most.

    Returns:
        The tasks that do not answer.
    """
    caller = name_call()
    began, pause = time.monotonic(), _FIRST_REPORT_SECONDS
    with ThreadPoolExecutor(max(1, len(channels)), "jaxdist-join") as threads:
        asked = {threads.submit(_is_ready, c, seconds): name for name, c in channels.items()}
        left: set[Future[bool]] = set(asked)
        while left:
            left = wait(left, timeout=pause).not_done
            if left:
                names = [name for future, name in asked.items() if future in left]
                _LOG.warning(
                    "%s waits for %s since %.0f s, and gives up after %g s (JAXDIST_JOIN_SECONDS).",
                    caller,
                    ", ".join(names),
                    time.monotonic() - began,
                    seconds,
                )
                pause = _NEXT_REPORT_SECONDS
    return [name for future, name in asked.items() if not future.result()]


def _is_ready(channel: Channel, seconds: float) -> bool:
    try:
        channel.wait_until_ready(seconds)
    except DeadlineExceededError:
        return False
    return True


class LocalTasks:
    """Servers and workers in this process.

    Args:
        cluster: How many there are.
        client: The id of the job's run.
        max_staleness: The bound of the servers.
        layouts: The replicas of each worker.
        make_layout: Returns the replicas of a worker that joins, by its index.
    """

    def __init__(
        self,
        cluster: Task,
        client: str,
        max_staleness: int | None,
        layouts: Sequence[ReplicaMesh],
        make_layout: Callable[[int], ReplicaMesh],
    ) -> None:
        names = [f"ps:{n}" for n in range(len(cluster.servers))]
        servers = [VariableServer(name, max_staleness=max_staleness) for name in names]
        self.storage = Servers(servers, client)
        self._platforms = sorted({find_platform(layout) for layout in layouts})
        storage = self.storage

        def make_link(index: int, layout: ReplicaMesh) -> LocalWorkerLink:
            return LocalWorkerLink(index, Worker(storage, layout, max_staleness), client)

        self.links = [make_link(n, layout) for n, layout in enumerate(layouts)]
        self.joining = LocalJoining(self.links, lambda n: make_link(n, make_layout(n)))

    def check_dataset(self, dataset_or_fn: Any) -> None:
        """Do nothing: a worker in this process can call any function."""

    def find_platforms(self) -> Sequence[str]:
        """Return the platforms of the workers, as `jax.export` names them."""
        return self._platforms

    def watch(self, client: str) -> None:
        """Do nothing: these servers lose nothing."""

    def report(self) -> ServerReport:
        """Return what the servers have counted; they lose nothing."""
        return ServerReport(_add_staleness(self.storage, None))


class RemoteTasks:
    """Servers and workers as other tasks, by gRPC.

    Args:
        cluster: Their addresses.
        client: The id of the job's run.
        max_staleness: The bound that the servers get.

    Raises:
        DeadlineExceededError: Tasks do not answer within `JAXDIST_JOIN_SECONDS`.
        ClusterError: Another task answers at an address.
        UnauthenticatedError: A task has another secret.
    """

    def __init__(self, cluster: Task, client: str, max_staleness: int | None) -> None:
        channels = _connect_all(cluster)
        servers = [PatientServer(c, n) for n, c in enumerate(channels[: len(cluster.servers)])]
        self.storage, self._servers = Servers(servers, client), servers
        self._losses = LossReport(self.storage, client, "functions")
        # Functions of workers, and steps that run in this process.
        self._clients = [client]
        greeting = HelloWorker(client, list(cluster.servers), max_staleness)
        storage, losses = self.storage, self._losses

        def make_link(index: int, channel: Channel) -> RemoteWorkerLink:
            return RemoteWorkerLink(index, channel, greeting, storage.find_server, losses)

        self.links = [make_link(n, c) for n, c in enumerate(channels[len(cluster.servers) :])]
        # It adds the channels of workers that join to this list, which is closed at the end.
        self.joining = RemoteJoining(self.links, channels, make_link, channels[0])
        # At the end of the process, the threads of the coordinator end first.
        ending = weakref.finalize(self, _close_all, self.storage, channels)
        ending.atexit = False  # pyrefly: ignore[missing-attribute]
        for n, server in enumerate(servers):
            found = server.call(Hello(client))
            check_task(cluster.servers[n], f"ps:{n}", found.task)
            server.call(Configure(max_staleness))
        for link in self.links:
            _greet(link)

    @called("ClusterCoordinator.create_per_worker_dataset")
    def check_dataset(self, dataset_or_fn: Any) -> None:
        """Raise if other processes cannot find the function.

        Raises:
            ArgumentError: It has no name at the top of a module.
        """
        list_names(dataset_or_fn)

    def find_platforms(self) -> Sequence[str]:
        """Return the platforms of the workers, as `jax.export` names them."""
        return sorted({link.platform for link in self.links})

    def watch(self, client: str) -> None:
        """Count which changes of steps that run in this process the servers lose."""
        self._clients.append(client)
        for server in self._servers:
            server.watch(client)

    def report(self) -> ServerReport:
        """Return what the servers have counted, and what they have lost."""
        staleness, lost = _add_staleness(self.storage, self._clients), self._losses.count()
        lost_changes = sum(server.count_lost_changes() for server in self._servers)
        return ServerReport(staleness, lost, lost_changes)


def _connect_all(cluster: Task) -> list[Channel]:
    """Connect to all servers and workers, and wait until they answer."""
    addresses = [
        *((f"ps {n}", address) for n, address in enumerate(cluster.servers)),
        *((f"worker {n}", address) for n, address in enumerate(cluster.workers)),
    ]
    channels = [connect(address, layer="grpc", name=name) for name, address in addresses]
    named = {f"{name} at {a}": c for (name, a), c in zip(addresses, channels, strict=True)}
    seconds = get_settings().join_seconds
    missing = wait_for_tasks(named, seconds)
    if missing:
        for channel in channels:
            channel.close()
        raise DeadlineExceededError(
            f"{name_call()} waited {seconds:g} s, and {len(missing)} of {len(channels)} tasks do "
            f"not answer:\n{format_lines(missing)}\n\nThe coordinator begins when all servers and "
            "workers answer.\n\nStart them: `jaxdist server` in each, or "
            "jaxdist.Server(resolver.cluster_spec(), resolver.task_type, "
            "resolver.task_id).join(). JAXDIST_JOIN_SECONDS is how long to wait."
        )
    return channels


def _greet(link: RemoteWorkerLink) -> None:
    """Greet a worker; one that was there, and does not reply, is waited for as at the start."""
    end = time.monotonic() + get_settings().join_seconds
    while True:
        try:
            link.hello()
        except WorkerUnavailableError:
            if time.monotonic() >= end:
                raise
        else:
            return
        time.sleep(_PAUSE)


def _close_all(storage: Servers, channels: Sequence[Channel]) -> None:
    storage.close()
    for channel in channels:
        channel.close()


def _add_staleness(storage: Servers, clients: Sequence[str] | None) -> dict[int, int]:
    """Return the staleness of the changes of some clients; None means all that there were."""
    staleness: Counter[int] = Counter()
    for link in storage.links:
        found = link.call(GetStatistics())
        of = found.staleness_of
        counts = [found.staleness] if clients is None else [of.get(c, {}) for c in clients]
        for one in counts:
            staleness.update(one)
    return dict(staleness)
