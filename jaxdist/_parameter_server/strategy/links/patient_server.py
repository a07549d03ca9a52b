"""`PatientServer`: a server that the caller waits for while it is started again."""

import itertools
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxdist._parameter_server.coordinator import FinishedNumbers, read_wait_settings
from jaxdist._parameter_server.server import Change, Changed
from jaxdist._parameter_server.transport import Channel, Message
from jaxdist._parameter_server.variables.remote_server import RemoteServer
from jaxdist.errors import DeadlineExceededError, PSUnavailableError

_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.25


class PatientServer(RemoteServer):
    """A server, as a task uses it whose own calls nobody repeats.

    A call that finds no server is repeated for `JAXDIST_SERVER_SECONDS`, as a closure is. A change
    of the caller itself has a number, so one whose reply was lost counts once.

    Args:
        channel: To the server.
        index: Its number among the servers.
    """

    def __init__(self, channel: Channel, index: int) -> None:
        super().__init__(channel, index)
        # Numbers of changes that belong to no closure.
        self._own = _OwnChanges()
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
        number = None
        if closure is None:
            client, number = self._own.client, self._own.begin()
            closure, done_below = number, self._own.below
        try:
            return super().change(
                changes,
                client=client,
                closure=closure,
                done_below=done_below,
                incarnation=incarnation,
                read=read,
                known=known,
            )
        finally:
            if number is not None:
                self._own.end(number)

    def release(self, client: str, closure: int) -> bool:
        """Remove the reads of a closure. A server that was started again has none."""
        fields = {"client": client, "closure": closure}
        return bool(super()._call("release", fields).fields["was_registered"])

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
                return super()._call(method, fields, arrays, seconds)
            except (PSUnavailableError, DeadlineExceededError) as error:
                tries, waited = tries + 1, time.monotonic() - began
                if waited >= limit or self._is_closed.wait(min(pause, limit - waited)):
                    raise self._make_last(error, method, tries, waited, limit) from error
            pause = min(2 * pause, _LONGEST_PAUSE)

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


class _OwnChanges:
    """The numbers of changes that belong to no closure. All threads may use it."""

    def __init__(self) -> None:
        self.client = secrets.token_hex(8)
        self._numbers, self._finished = itertools.count(1), FinishedNumbers()
        self._lock = threading.Lock()

    @property
    def below(self) -> int:
        """The number below which all are finished."""
        return self._finished.below

    def begin(self) -> int:
        """Return a new number."""
        with self._lock:
            return next(self._numbers)

    def end(self, number: int) -> None:
        """Note that nobody sends a change again."""
        with self._lock:
            self._finished.add(number)
