"""Finds what servers have counted and then lost: functions, and changes of this task itself.

Note [Lost closures]
A worker reports with its results which servers have counted the closure, and in which incarnation.
A server that was started again reports what each of its restarts has found in its snapshot: the
number below which all closures were finished, and the later ones that were counted. A closure is
lost if an incarnation has counted it, and a restart after it did not find it. The id of an
incarnation contains how many restarts came before it, so that the order is known even if its own
snapshots are gone; and the id of the first one, since a server without a snapshot begins with
nothing.
"""

import itertools
import logging
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from jaxdist._parameter_server.coordinator import FinishedNumbers
from jaxdist._parameter_server.protocol import Hello, Restored, ServerInfo
from jaxdist._parameter_server.variables.servers import Servers
from jaxdist.errors import JaxdistError

_LOG = logging.getLogger("jaxdist")
_MOST_NAMES = 8
_Number = tuple[str, int]  # the client, and the number among its changes


class AcknowledgedClosures:
    """The closures that each incarnation of each server has counted, one bit for each."""

    def __init__(self) -> None:
        self._bits: dict[tuple[int, str], bytearray] = {}
        self._lock = threading.Lock()

    def note(self, number: int, counted: Mapping[int, str]) -> None:
        """Note that servers have counted a closure, by the number and incarnation of each."""
        byte, bit = divmod(number, 8)
        with self._lock:
            for key in counted.items():
                bits = self._bits.setdefault(key, bytearray())
                if byte >= len(bits):
                    bits.extend(bytes(max(byte + 1 - len(bits), len(bits))))
                bits[byte] |= 1 << bit

    def find_lost(self, hellos: Mapping[int, ServerInfo]) -> set[int]:
        """Return the closures whose changes a server has lost.

        Args:
            hellos: The present answer of each server to `Hello`, by its number.
        """
        lost: set[int] = set()
        with self._lock:
            for (place, incarnation), bits in self._bits.items():
                said = hellos[place]
                if said.incarnation == incarnation:
                    continue
                numbers = set(
                    np.flatnonzero(
                        np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")
                    ).tolist()
                )
                first, _, _ = incarnation.split("-")
                if not said.incarnation.startswith(f"{first}-"):
                    # It came back with nothing.
                    lost |= numbers
                    continue
                restores = _find_later(incarnation, said.restores)
                for restore in restores:
                    counted, below = set(restore.counted), restore.below
                    lost |= {n for n in numbers if n >= below and n not in counted}
        return lost


def _find_later(incarnation: str, restores: Sequence[Restored]) -> Sequence[Restored]:
    """Return the restarts that came after an incarnation."""
    for n, restore in enumerate(restores):
        if restore.incarnation == incarnation:
            return restores[n + 1 :]
    later = [r for r in restores if _get_generation(r.incarnation) >= _get_generation(incarnation)]
    return later or restores[-1:]


def _get_generation(incarnation: str) -> int:
    return int(incarnation.split("-")[1])


class LossReport:
    """Counts the functions that servers have counted and then lost, and logs each loss.

    A server that is started again has the values of its snapshot. A loss is found when the server
    counts the next function; functions of other workers that were under way may be added later.

    Args:
        servers: The servers.
        client: The id that belongs to the numbers of the functions.
        what: What the log calls a function, such as `steps of this worker`.
    """

    def __init__(self, servers: Servers, client: str, what: str) -> None:
        self._servers, self._client, self._what = servers, client, what
        self._acknowledged = AcknowledgedClosures()
        self._incarnations: dict[int, str] = {}
        self._lock = threading.Lock()
        self._reported = 0

    def note(self, number: int, counted: Mapping[int, str], read: Mapping[int, str]) -> None:
        """Note that servers have counted a function, and log what was lost before it.

        A `PatientServer` that is asked for this also logs which changes of this task are lost.

        Args:
            number: The number of the function.
            counted: The incarnation of each server, by the number of the server.
            read: Those of the servers that the function only reads.
        """
        self._acknowledged.note(number, counted)
        with self._lock:
            used = {**read, **counted}
            again = sorted(n for n, inc in used.items() if self._find_known(n, inc) != inc)
            self._incarnations.update(used)
        if again:
            # The servers are asked what they have found in their snapshots, and one of them may be
            # gone again. No function waits for that.
            threading.Thread(target=self._report, args=(again,), daemon=True).start()

    def _find_known(self, place: int, incarnation: str) -> str:
        """Return the incarnation of a server that this task has heard of before."""
        known = self._incarnations.get(place)
        return known or self._servers.links[place].incarnation or incarnation

    def count(self) -> int:
        """Ask the servers, and return how many functions were lost since the job began."""
        links = self._servers.links
        hellos = {n: link.call(Hello(self._client)) for n, link in enumerate(links)}
        return len(self._acknowledged.find_lost(hellos))

    def _report(self, again: Sequence[int]) -> None:
        try:
            count = self.count()
        except JaxdistError as error:
            _LOG.info("How much was lost is not known yet: %s", error)
            return
        with self._lock:
            before, self._reported = self._reported, count
        _LOG.warning(
            "%s was started again from its snapshot. Lost %s: %d, and %d since the job began.",
            " and ".join(f"ps {n}" for n in again),
            self._what,
            count - before,
            count,
        )


class OwnChanges:
    """The changes of a task on one server that belong to no closure. All threads may use it.

    The server counts these changes by number, as those of closures, and its snapshots keep the
    numbers. So the server can say which of them a snapshot had; see Note [Lost closures].

    Args:
        index: The number of the server.

    Attributes:
        client: The id that belongs to the numbers of `begin`.
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
            client: The id that belongs to its number.
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
            ask: Returns the answer of the server to `Hello` of a client.

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
