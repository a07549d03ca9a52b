"""`NewWorkers`: a thread that takes workers which announce themselves."""

import logging
import threading

from jaxdist._parameter_server.coordinator.protocols import Joining
from jaxdist._parameter_server.coordinator.workers import Workers

_LOG = logging.getLogger("jaxdist")
_PERIOD_SECONDS = 1.0


class NewWorkers:
    """A thread that asks once a second for workers that have announced themselves.

    It ends when the threads of the workers are stopped.

    Args:
        workers: The threads of all workers, to which those of new ones are added.
        joining: Finds the new ones.
    """

    def __init__(self, workers: Workers, joining: Joining) -> None:
        self._workers, self._joining = workers, joining
        self.thread = threading.Thread(target=self._work, name="jaxdist-new-workers", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self.thread.start()

    def _work(self) -> None:
        while not self._workers.is_stopped.wait(_PERIOD_SECONDS):
            for link in self._joining.find_new():
                self._workers.add(link)
                _LOG.warning("Worker %d has joined, and takes functions now.", link.index)
