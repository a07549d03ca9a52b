"""Parameter servers that are in this process, by their addresses."""

import threading
import weakref
from collections.abc import Sequence

from jaxdist._parameter_server.server import VariableServer


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
