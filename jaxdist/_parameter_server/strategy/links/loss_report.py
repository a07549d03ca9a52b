"""`LossReport`: says which functions servers have counted and then lost."""

import logging
import threading
from collections.abc import Mapping, Sequence

from jaxdist._parameter_server.protocol import Hello
from jaxdist._parameter_server.strategy.links.lost_closures import AcknowledgedClosures
from jaxdist._parameter_server.variables.servers import Servers
from jaxdist.errors import JaxdistError

_LOG = logging.getLogger("jaxdist")


class LossReport:
    """Counts the functions that servers have counted and then lost, and logs each loss.

    A server that is started again has the values of its snapshot. A loss is found when the server
    counts the next function; functions of other workers that were under way may be added later.

    Args:
        servers: The servers.
        client: Who has numbered the functions.
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
