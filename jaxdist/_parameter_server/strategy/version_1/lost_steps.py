"""`LostSteps`: reports the steps of a worker that servers have counted and then lost."""

import logging
from collections.abc import Mapping

from jaxdist._parameter_server.strategy.links.lost_closures import AcknowledgedClosures
from jaxdist._parameter_server.variables.servers import Servers

_LOG = logging.getLogger("jaxdist")


class LostSteps:
    """Reports the steps of this worker that servers have counted and then lost.

    A server that is started again has the values of its snapshot. No coordinator counts what is
    missing, so each worker says it of its own steps.

    Args:
        servers: The servers.
        client: Who has numbered the steps.

    Attributes:
        count: How many steps were lost.
    """

    def __init__(self, servers: Servers, client: str) -> None:
        self.count = 0
        self._servers, self._client = servers, client
        self._acknowledged = AcknowledgedClosures()
        self._incarnations: dict[int, str] = {}

    def note(self, number: int, counted: Mapping[int, str]) -> None:
        """Note that servers have counted a step, and report what was lost before it.

        Args:
            number: The number of the step.
            counted: The incarnation of each server, by the number of the server.
        """
        self._acknowledged.note(number, counted)
        again = [n for n, inc in counted.items() if self._incarnations.get(n, inc) != inc]
        self._incarnations.update(counted)
        if not again:
            return
        known = self._incarnations
        hellos = {n: self._servers.links[n].hello(self._client) for n in known}
        before, self.count = self.count, len(self._acknowledged.find_lost(hellos))
        _LOG.warning(
            "%s was started again from its snapshot: %d step(s) of this worker are lost, %d since "
            "it began.",
            " and ".join(f"ps {n}" for n in again),
            self.count - before,
            self.count,
        )
