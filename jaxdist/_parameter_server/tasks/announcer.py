"""`Announcer`: announces a worker to the first parameter server."""

import logging
import os
import threading
import time
from collections.abc import Callable

from jaxdist._parameter_server.coordinator import first_line
from jaxdist._parameter_server.protocol import Announce
from jaxdist._parameter_server.transport import connect
from jaxdist._parameter_server.transport.requests import call
from jaxdist._processes import get_settings
from jaxdist.errors import ArgumentError, ClusterError, JaxdistError

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
    """A thread that announces this worker to the first parameter server every 2 s.

    The coordinator asks the server, and so finds workers that its cluster does not list.

    Args:
        server: The address of the server.
        worker: The index of this worker.
        address: Where the coordinator reaches it.
        give_up: Called with an error if the server does not answer for `JAXDIST_JOIN_SECONDS`:
            the job has ended. Nothing is announced afterwards.
    """

    def __init__(
        self, server: str, worker: int, address: str, give_up: Callable[[JaxdistError], None]
    ) -> None:
        self._server, self._give_up = server, give_up
        self._seconds = get_settings().join_seconds
        self._channel = connect(server, layer="grpc", name="ps 0")
        self._request = Announce(worker, address)
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._work, name="jaxdist-announcer", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop announcing."""
        self._is_stopped.set()
        # This ends a call that waits.
        self._channel.close()
        self._thread.join()

    def _work(self) -> None:
        is_heard, heard = True, time.monotonic()
        while not self._is_stopped.is_set():
            try:
                call(self._channel, self._request, _CALL_SECONDS)
                is_heard, heard = True, time.monotonic()
            except JaxdistError as error:
                # The server may be started later than this worker, or again.
                if is_heard and not self._is_stopped.is_set():
                    _LOG.warning(
                        "The worker could not announce itself yet, and tries again: %s",
                        first_line(error),
                    )
                is_heard = False
                silent = time.monotonic() - heard
                if silent >= self._seconds and not self._is_stopped.is_set():
                    self._give_up(self._make_error(silent, error))
                    return
            self._is_stopped.wait(_PERIOD_SECONDS)

    def _make_error(self, silent: float, error: JaxdistError) -> ClusterError:
        return ClusterError(
            f"The parameter server 0 at {self._server} has not answered for {silent:.0f} s "
            f"({first_line(error)}).\n\n"
            "A worker that announces itself ends when the server is silent for "
            f"{self._seconds:g} s (JAXDIST_JOIN_SECONDS): its job has ended, or never "
            "started.\n\n"
            "Start the servers before the worker, or set JAXDIST_JOIN_SECONDS to a longer time."
        )
