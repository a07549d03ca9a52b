"""`PatientServer`: a server that the caller waits for while it is started again."""

import logging
import threading
import time
from typing import Any

import msgspec

from jaxdist._parameter_server.coordinator import Backoff, first_line, read_wait_settings
from jaxdist._parameter_server.protocol import ChangeVariables, Hello, Release, ServerInfo
from jaxdist._parameter_server.server import TOO_STALE
from jaxdist._parameter_server.strategy.losses import OwnChanges
from jaxdist._parameter_server.transport import Channel, Message
from jaxdist._parameter_server.transport.requests import (
    R,
    Request,
    get_reply_kind,
    make_message,
    read_reply,
)
from jaxdist._parameter_server.variables.remote_server import RemoteServer
from jaxdist.errors import DeadlineExceededError, JaxdistError, PSUnavailableError

_LOG = logging.getLogger("jaxdist")
_HELLO_SECONDS = 5.0


class PatientServer(RemoteServer):
    """A server, for a task whose own calls nobody else repeats.

    A call that finds no server is repeated for `JAXDIST_SERVER_SECONDS`, as a closure is. A change
    of the caller itself has a number, so one whose reply was lost counts once. Those that a server
    has lost when it was started again from its snapshot are logged and counted.

    Args:
        channel: To the server.
        index: Its number among the servers.
    """

    def __init__(self, channel: Channel, index: int) -> None:
        super().__init__(channel, index)
        # Numbers of changes that belong to no closure.
        self._own = OwnChanges(index)
        # The other clients whose changes come from this task.
        self._watched: set[str] = set()
        # The incarnation whose snapshot was asked for these; "" before the first reply.
        self._compared = ""
        self._is_closed = threading.Event()

    def call(self, request: Request[R]) -> R:
        """Return the reply to a request. Changes count once.

        Raises:
            PSUnavailableError: The server does not answer for `JAXDIST_SERVER_SECONDS`.
            DeadlineExceededError: It answers too late each time.
            JaxdistError: What the server raised.
        """
        if isinstance(request, Release):
            # A server that was started again has nothing to release.
            message = make_message(request.method, request)
            return read_reply(get_reply_kind(type(request)), super()._exchange(message))
        if not isinstance(request, ChangeVariables):
            return super().call(request)
        if request.closure is not None:
            return self._change(request, is_own=request.client in self._watched)
        number = self._own.begin()
        request = msgspec.structs.replace(
            request, client=self._own.client, closure=number, done_below=self._own.below
        )
        try:
            return self._change(request, is_own=True)
        finally:
            self._own.end(number)

    def _change(self, request: ChangeVariables, *, is_own: bool) -> Any:
        found = super().call(request)
        if is_own and request.closure is not None and found.status != TOO_STALE:
            names = [change.name for change in request.changes]
            self._own.note(request.client, request.closure, found.incarnation, names)
            self._compare(found.incarnation)
        return found

    def watch(self, client: str) -> None:
        """Treat the closures of a client as changes of the caller itself: they run in its process.

        Args:
            client: The id that belongs to their numbers.
        """
        self._watched.add(client)

    def count_lost_changes(self) -> int:
        """Return how many changes of the caller itself the server has lost, as far as it reported.

        Raises:
            PSUnavailableError: The server was started again, and does not answer any more.
        """
        while self.incarnation != self._compared:
            self.call(Hello())
        return self._own.lost

    def close(self) -> None:
        """Close the connection; calls that wait raise."""
        self._is_closed.set()
        super().close()

    def _exchange(self, message: Message, seconds: float | None = None) -> Message:
        began, backoff = time.monotonic(), Backoff()
        limit = read_wait_settings().server_seconds
        tries = 0
        while True:
            try:
                reply = super()._exchange(message, seconds)
            except (PSUnavailableError, DeadlineExceededError) as error:
                tries, waited = tries + 1, time.monotonic() - began
                pause = min(backoff.find_next(), limit - waited)
                if waited >= limit or self._is_closed.wait(pause):
                    times = "once" if tries == 1 else f"{tries} times"
                    raise type(error)(
                        f"{first_line(error)}\n\n{message.method!r} was tried {times}, for "
                        f"{waited:.1f} s. A call to a server waits {limit:g} s "
                        "(JAXDIST_SERVER_SECONDS) for it to come back.\n\n"
                        "Start the server again: it then serves from its snapshot. Set "
                        f"JAXDIST_SERVER_SECONDS={2 * limit:g} to wait longer.",
                        [self._index],
                    ) from error
            else:
                self._compare(self.incarnation)
                return reply

    def _compare(self, incarnation: str) -> None:
        """Find what a server has lost, if it was started again."""
        if incarnation == self._compared:
            return
        if not self._compared:
            self._compared = incarnation
            return
        try:
            self._compared = self._own.find_lost(incarnation, self._ask)
        except JaxdistError as error:
            # It is gone again. This call has its reply; the next one will ask.
            _LOG.info("What ps %d has lost is not known yet: %s", self._index, error)

    def _ask(self, client: str) -> ServerInfo:
        message = make_message(Hello.method, Hello(client))
        return read_reply(ServerInfo, super()._exchange(message, _HELLO_SECONDS))
