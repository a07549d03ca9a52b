"""`PatientServer`: a server that the caller waits for while it is started again."""

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxdist._parameter_server.coordinator import read_wait_settings
from jaxdist._parameter_server.server import TOO_STALE, Change, Changed
from jaxdist._parameter_server.strategy.links.own_changes import OwnChanges
from jaxdist._parameter_server.transport import Channel, Message
from jaxdist._parameter_server.variables.remote_server import RemoteServer
from jaxdist.errors import DeadlineExceededError, JaxdistError, PSUnavailableError

_LOG = logging.getLogger("jaxdist")
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.25
_HELLO_SECONDS = 5.0


class PatientServer(RemoteServer):
    """A server, as a task uses it whose own calls nobody repeats.

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
        # Who else numbers changes of this task.
        self._watched: set[str] = set()
        # The incarnation whose snapshot was asked for these; "" before the first reply.
        self._compared = ""
        self._is_closed = threading.Event()

    def change(
        self,
        changes: Sequence[Change],
        *,
        client: str = "",
        closure: int | None = None,
        done_below: int = 0,
        incarnation: str | None = None,
        read: Sequence[str] = (),
        known: Mapping[str, int] | None = None,
    ) -> Changed:
        """Apply changes once."""
        is_own, number = closure is None or client in self._watched, None
        if closure is None:
            client, number = self._own.client, self._own.begin()
            closure, done_below = number, self._own.below
        try:
            found = super().change(
                changes,
                client=client,
                closure=closure,
                done_below=done_below,
                incarnation=incarnation,
                read=read,
                known=known,
            )
            if is_own and found.status != TOO_STALE:
                names = [c.name for c in changes]
                self._own.note(client, closure, found.incarnation, names)
                self._compare(found.incarnation)
            return found
        finally:
            if number is not None:
                self._own.end(number)

    def release(self, client: str, closure: int) -> bool:
        """Remove the reads of a closure. A server that was started again has none."""
        fields = {"client": client, "closure": closure}
        return bool(super()._call("release", fields).fields["was_registered"])

    def watch(self, client: str) -> None:
        """Treat the closures of a client as changes of the caller itself: they run in its process.

        Args:
            client: Who has numbered them.
        """
        self._watched.add(client)

    def count_lost_changes(self) -> int:
        """Return how many changes of the caller itself were lost, as far as the server was heard.

        Raises:
            PSUnavailableError: The server was started again, and does not answer any more.
        """
        while self.incarnation != self._compared:
            self.hello()
        return self._own.lost

    def close(self) -> None:
        """Close the connection; calls that wait raise."""
        self._is_closed.set()
        super().close()

    def _call(
        self,
        method: str,
        fields: dict[str, Any],
        arrays: Sequence[np.ndarray] = (),
        seconds: float | None = None,
    ) -> Message:
        began, pause = time.monotonic(), _FIRST_PAUSE
        limit = read_wait_settings().server_seconds
        tries = 0
        while True:
            try:
                reply = super()._call(method, fields, arrays, seconds)
            except (PSUnavailableError, DeadlineExceededError) as error:
                tries, waited = tries + 1, time.monotonic() - began
                if waited >= limit or self._is_closed.wait(min(pause, limit - waited)):
                    raise self._make_last(error, method, tries, waited, limit) from error
            else:
                self._compare(self.incarnation)
                return reply
            pause = min(2 * pause, _LONGEST_PAUSE)

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
            # It is gone again. The call has its reply; the next one asks.
            _LOG.info("What ps %d has lost is not known yet: %s", self._index, error)

    def _ask(self, client: str) -> Mapping[str, Any]:
        return super()._call("hello", {"client": client}, seconds=_HELLO_SECONDS).fields

    def _make_last(
        self,
        error: PSUnavailableError | DeadlineExceededError,
        method: str,
        tries: int,
        waited: float,
        limit: float,
    ) -> PSUnavailableError | DeadlineExceededError:
        kind = (
            DeadlineExceededError
            if isinstance(error, DeadlineExceededError)
            else PSUnavailableError
        )
        times = "once" if tries == 1 else f"{tries} times"
        first = str(error).partition("\n")[0]
        return kind(
            f"{first}\n\n{method!r} was tried {times}, for {waited:.1f} s. "
            f"A call of a server waits {limit:g} s (JAXDIST_SERVER_SECONDS) for it to return.\n\n"
            "Start the server again: it then serves from its snapshot. Set "
            f"JAXDIST_SERVER_SECONDS={2 * limit:g} to wait longer.",
            [self._index],
        )
