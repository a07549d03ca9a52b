"""`Announcer`: a worker tells the first parameter server that it is there."""

import logging
import os
import threading

from jaxdist._parameter_server.transport import Message, connect
from jaxdist.errors import ArgumentError, JaxdistError

_LOG = logging.getLogger("jaxdist")
_PERIOD_SECONDS = 2.0
_CALL_SECONDS = 5.0
_VARIABLE = "JAXDIST_ANNOUNCE"


def read_announce() -> bool:
    """Return whether the environment asks workers to announce themselves.

    Raises:
        ArgumentError: The variable is neither 0 nor 1.
    """
    value = os.environ.get(_VARIABLE, "").strip()
    if value not in ("", "0", "1"):
        raise ArgumentError(
            f"The environment variable {_VARIABLE} is {value!r}.\n\n"
            "It says whether a worker announces itself to the first parameter server.\n\n"
            f"Set {_VARIABLE}=1, or unset it."
        )
    return value == "1"


class Announcer:
    """A thread that tells the first parameter server every 2 s that this worker is there.

    The coordinator asks the server, and so finds workers that its cluster does not list.

    Args:
        server: The address of the server.
        worker: The index of this worker.
        address: Where the coordinator reaches it.
    """

    def __init__(self, server: str, worker: int, address: str) -> None:
        self._channel = connect(server, layer="grpc", name="ps 0")
        self._message = Message("announce", {"worker": worker, "address": address})
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._work, name="jaxdist-announcer", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Tell it no more."""
        self._is_stopped.set()
        # A call that waits raises then.
        self._channel.close()
        self._thread.join()

    def _work(self) -> None:
        is_heard = True
        while not self._is_stopped.is_set():
            try:
                self._channel.call(self._message, _CALL_SECONDS)
                is_heard = True
            except JaxdistError as error:
                # The server may be started later than this worker, or again.
                if is_heard and not self._is_stopped.is_set():
                    first = str(error).partition("\n")[0]
                    _LOG.warning("The worker is not announced yet, and tries again: %s", first)
                is_heard = False
            self._is_stopped.wait(_PERIOD_SECONDS)
