"""`WorkerServers`: the servers, as one of several workers that run the same script uses them."""

import secrets
import threading
import time
from collections.abc import Sequence

from jaxdist._parameter_server.strategy.links.patient_server import PatientServer
from jaxdist._parameter_server.strategy.links.remote_link import make_wrong_task_error
from jaxdist._parameter_server.strategy.version_1.in_process import SERVERS_IN_PROCESS
from jaxdist._parameter_server.strategy.version_1.own_task import OwnTask
from jaxdist._parameter_server.transport import connect
from jaxdist._parameter_server.variables.servers import ServerLink, Servers
from jaxdist._processes import get_settings
from jaxdist.errors import DeadlineExceededError

_FIRST_PAUSE, _LONGEST_PAUSE = 0.005, 0.2


class WorkerServers(Servers):
    """The servers, as a worker uses them.

    All workers make the same variables in the same order, so the names and the servers of variables
    are the same in all of them. The chief's first values count: the others wait until it has made
    the variable, and then use it.

    Args:
        task: The worker.
    """

    def __init__(self, task: OwnTask) -> None:
        self._task = task
        # Those that no one has waited for yet.
        self._channels = (
            []
            if task.is_local
            else [connect(a, layer="grpc", name=f"ps {n}") for n, a in enumerate(task.ps)]
        )
        self._connecting = threading.Lock()
        links: list[ServerLink] = (
            [*SERVERS_IN_PROCESS.find(task.ps)]
            if task.is_local
            else [PatientServer(channel, n) for n, channel in enumerate(self._channels)]
        )
        super().__init__(links, secrets.token_hex(8))

    def _wait_for_servers(self) -> None:
        """Wait until all servers answer."""
        with self._connecting:
            began, limit = time.monotonic(), get_settings().join_seconds
            while self._channels:
                number = len(self._task.ps) - len(self._channels)
                address = self._task.ps[number]
                try:
                    self._channels[0].wait_until_ready(began + limit - time.monotonic())
                except DeadlineExceededError as error:
                    raise DeadlineExceededError(
                        f"{self._task.job} {self._task.number} waited {limit:g} s "
                        f"(JAXDIST_JOIN_SECONDS), and ps {number} at {address} does not answer.\n\n"
                        "Variables are made on the parameter servers, which have to be there.\n\n"
                        "Start them: `jaxdist server` in each, or jaxdist.Server("
                        "resolver.cluster_spec(), resolver.task_type, resolver.task_id).join()."
                    ) from error
                found = self.links[number].hello()
                if found["task"] != f"ps:{number}":
                    raise make_wrong_task_error(address, f"ps:{number}", found)
                del self._channels[0]

    def _before_creation(self, place: int, names: Sequence[str]) -> None:
        self._wait_for_servers()
        if self._task.is_chief:
            return
        began, pause = time.monotonic(), _FIRST_PAUSE
        limit = get_settings().join_seconds
        while missing := set(names) - set(self.links[place].hello()["versions"]):
            waited = time.monotonic() - began
            if waited > limit:
                raise DeadlineExceededError(
                    f"{self._task.job} {self._task.number} waited {waited:.0f} s "
                    f"(JAXDIST_JOIN_SECONDS) for the chief to make {sorted(missing)[0]!r} on ps "
                    f"{place}.\n\n"
                    "Every worker makes the same variables in the same order, and the chief's "
                    "first values count. The chief is the task of the job 'chief', or worker 0.\n\n"
                    "Start the chief, and let it run the same script."
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
