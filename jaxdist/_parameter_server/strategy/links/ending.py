"""Workers that have announced themselves end when the process of their coordinator ends."""

import logging
import threading
import time

from jaxdist._parameter_server.coordinator import call_at_exit
from jaxdist._parameter_server.transport import connect
from jaxdist._parameter_server.transport.requests import call
from jaxdist._parameter_server.worker_protocol import End
from jaxdist.errors import JaxdistError

_LOG = logging.getLogger("jaxdist")
_CALL_SECONDS = 5.0


class Endings:
    """The workers that this process tells of its end.

    A strategy may be deleted long before the process ends, and another one made that the same
    workers take part in. So they are told when the process ends, over connections of their own.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clients: dict[str, str] = {}

    def note(self, address: str, client: str) -> None:
        """Note that a worker has announced itself.

        Args:
            address: Where it is.
            client: The id of the coordinator's run that it works for now.
        """
        with self._lock:
            self._clients[address] = client

    def tell(self) -> None:
        """Tell the workers at once; wait up to 5 s for those that do not answer."""
        with self._lock:
            found = dict(self._clients)
            self._clients.clear()
        threads = [
            threading.Thread(target=_tell_end, args=pair, name="jaxdist-ending", daemon=True)
            for pair in found.items()
        ]
        for thread in threads:
            thread.start()
        end = time.monotonic() + _CALL_SECONDS
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))


def _tell_end(address: str, client: str) -> None:
    channel = connect(address, layer="grpc", name=f"the worker at {address}")
    try:
        call(channel, End(client), _CALL_SECONDS)
    except JaxdistError as error:
        # It has ended already, or works for another coordinator.
        _LOG.debug("The worker at %s was not told that the training has ended: %s", address, error)
    finally:
        channel.close()


ENDINGS = Endings()
call_at_exit(ENDINGS.tell)
