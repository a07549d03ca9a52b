"""`OwnChanges`: the changes that a task makes on a server outside of functions, and their loss."""

import itertools
import logging
import secrets
import threading
from collections.abc import Callable, Iterable

from jaxdist._parameter_server.coordinator import FinishedNumbers
from jaxdist._parameter_server.protocol import ServerInfo
from jaxdist._parameter_server.strategy.links.lost_closures import AcknowledgedClosures

_LOG = logging.getLogger("jaxdist")
_MOST_NAMES = 8

_Number = tuple[str, int]  # the client, and the number among its changes


class OwnChanges:
    """The changes of a task on one server that belong to no closure. All threads may use it.

    The server counts these changes by number, as those of closures, and its snapshots keep the
    numbers. So the server can say which of them a snapshot had; see Note [Lost closures].

    Args:
        index: The number of the server.

    Attributes:
        client: Who has the numbers of `begin`.
        lost: How many were lost, as of the last `find_lost`.
    """

    def __init__(self, index: int) -> None:
        self.client, self.lost = secrets.token_hex(8), 0
        self._index = index
        self._numbers, self._finished = itertools.count(1), FinishedNumbers()
        self._acknowledged: dict[str, AcknowledgedClosures] = {}
        # The last change of each variable, by incarnation of the server: a snapshot that lacks any
        # change of a variable lacks this one.
        self._last: dict[str, dict[str, _Number]] = {}
        self._lock = threading.Lock()
        self._asking = threading.Lock()

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

    def note(self, client: str, number: int, incarnation: str, names: Iterable[str]) -> None:
        """Note that the server has a change.

        Args:
            client: Who has numbered it.
            number: Its number.
            incarnation: The incarnation of the server that has it.
            names: The variables that it changes.
        """
        # While `find_lost` asks, the server may be started again. Changes that the next incarnation
        # has are noted when the reply of this one was compared.
        with self._asking:
            known = self._acknowledged.setdefault(client, AcknowledgedClosures())
            known.note(number, {self._index: incarnation})
            self._last.setdefault(incarnation, {}).update(dict.fromkeys(names, (client, number)))

    def find_lost(self, incarnation: str, ask: Callable[[str], ServerInfo]) -> str:
        """Ask a server that was started again which changes it has, and log those that are lost.

        Args:
            incarnation: The new incarnation of the server. It is not asked if nothing can be lost.
            ask: Returns what the server says of itself, and of the changes of a client.

        Returns:
            The incarnation that has answered.
        """
        with self._asking:
            said = [(client, ask(client)) for client in self._acknowledged]
            if not said:
                return incarnation
            lost = {
                (client, number)
                for client, found in said
                for number in self._acknowledged[client].find_lost({self._index: found})
            }
            before, self.lost = self.lost, len(lost)
            _, first = said[0]
            if len(lost) > before:
                self._log(first, lost, len(lost) - before)
            # The server may have been started again since; the next reply shows it.
            return first.incarnation

    def _log(self, said: ServerInfo, lost: set[_Number], count: int) -> None:
        names = set()
        for incarnation, last in list(self._last.items()):
            gone = {name for name, number in last.items() if number in lost}
            names |= gone
            # Each is named once.
            self._last[incarnation] = {n: k for n, k in last.items() if n not in gone}
        listed = [repr(name) for name in sorted(names)]
        if len(listed) > _MOST_NAMES:
            listed[_MOST_NAMES:] = [f"{len(listed) - _MOST_NAMES} more"]
        _LOG.warning(
            "ps %d was started again %s. Lost changes that this task had made outside of "
            "functions: %d, and %d since the job began. They changed %s. Make them again if the "
            "values matter.",
            self._index,
            "from its snapshot" if said.snapshot else "without a snapshot",
            count,
            self.lost,
            ", ".join(listed),
        )
