"""`WorkerServers`: the servers, as one of several workers that run the same script uses them."""

import logging
import math
import secrets
import threading
import time
import weakref
from collections.abc import Sequence

from jaxdist._called import call_as
from jaxdist._cluster import Task
from jaxdist._parameter_server.coordinator import Backoff
from jaxdist._parameter_server.protocol import Hello
from jaxdist._parameter_server.server import VariableServer
from jaxdist._parameter_server.strategy.patient_server import PatientServer
from jaxdist._parameter_server.strategy.remote_link import make_wrong_task_error
from jaxdist._parameter_server.strategy.tasks import wait_for_tasks
from jaxdist._parameter_server.transport import connect
from jaxdist._parameter_server.variables.remote_server import Link
from jaxdist._parameter_server.variables.servers import Servers
from jaxdist._processes import get_settings
from jaxdist.errors import ClusterError, DeadlineExceededError

_LOG = logging.getLogger("jaxdist")
_REPORT_SECONDS = 5.0


class ServersInProcess:
    """The servers of jobs whose tasks are all in this process.

    The strategies of a job, one for each worker, find the same server at the same address. A server
    ends when the last strategy that uses it is deleted.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: weakref.WeakValueDictionary[str, VariableServer] = (
            weakref.WeakValueDictionary()
        )

    def find(self, addresses: Sequence[str]) -> list[VariableServer]:
        """Return the servers at some addresses; make those that are not there."""
        with self._lock:
            servers = []
            for number, address in enumerate(addresses):
                server = self._found.get(address)
                if server is None:
                    server = self._found[address] = VariableServer(f"ps:{number}")
                servers.append(server)
            return servers


SERVERS_IN_PROCESS = ServersInProcess()


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
        self._channels = (
            []
            if task.is_local
            else [connect(a, layer="grpc", name=f"ps {n}") for n, a in enumerate(task.servers)]
        )
        self._connecting = threading.Lock()
        links: list[Link] = (
            [*SERVERS_IN_PROCESS.find(task.servers)]
            if task.is_local
            else [PatientServer(channel, n) for n, channel in enumerate(self._channels)]
        )
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
            named = {
                f"ps {n} at {a}": channel
                for n, (a, channel) in enumerate(
                    zip(self._task.servers, self._channels, strict=True)
                )
            }
            missing = call_as(name, wait_for_tasks, named, limit)
            if missing:
                verb = "does" if len(missing) == 1 else "do"
                raise DeadlineExceededError(
                    f"{name} waited {limit:g} s (JAXDIST_JOIN_SECONDS), and {', '.join(missing)} "
                    f"{verb} not answer.\n\n"
                    "Variables are made on the parameter servers, which have to be there.\n\n"
                    "Start them: `jaxdist server` in each, or jaxdist.Server("
                    "resolver.cluster_spec(), resolver.task_type, resolver.task_id).join()."
                )
            for number, address in enumerate(self._task.servers):
                found = self.links[number].call(Hello())
                if found.task != f"ps:{number}":
                    raise make_wrong_task_error(address, f"ps:{number}", found.task)
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
