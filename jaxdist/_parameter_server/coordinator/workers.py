"""`Workers`: the threads of all workers, and what they share."""

import contextlib
import threading
import time
import weakref
from collections.abc import Iterable

from jaxdist._parameter_server.coordinator.closure_queue import ClosureQueue
from jaxdist._parameter_server.coordinator.per_worker import PerWorkerValues
from jaxdist._parameter_server.coordinator.protocols import WorkerLink
from jaxdist._parameter_server.coordinator.retries import make_all_lost_error
from jaxdist._parameter_server.coordinator.settings import WaitSettings
from jaxdist._parameter_server.coordinator.worker_thread import WorkerThread
from jaxdist._parameter_server.variables.servers import Fence
from jaxdist.errors import WorkerUnavailableError


class Workers:
    """The threads of all workers, and what they share.

    It does not refer to the coordinator, so that the threads do not keep it alive.

    Args:
        links: The connections to the workers.
        fence: The fence of the strategy.
        settings: How long closures wait for servers and workers.

    Attributes:
        queue: The closures.
        threads: One thread for each worker.
        others: Other threads that end with them.
        is_stopped: Set when all of them have to end.
    """

    def __init__(self, links: Iterable[WorkerLink], fence: Fence, settings: WaitSettings) -> None:
        self.settings = settings
        self.queue = ClosureQueue()
        self.fence = fence
        self.threads: list[WorkerThread] = []
        self.others: list[threading.Thread] = []
        self.is_stopped = threading.Event()
        self._values: weakref.WeakSet[PerWorkerValues] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._reported = 0.0
        for link in links:
            self.add(link)

    def add(self, link: WorkerLink) -> None:
        """Start the thread of a worker; it makes all per-worker values first."""
        with self._lock:
            if self.is_stopped.is_set():
                return
            thread = WorkerThread(link, self.queue, self.fence, self.settings, self)
            self.threads.append(thread)
            for values in self._list_values():
                thread.make(values)
        thread.start()

    def create(self, values: PerWorkerValues) -> None:
        """Make a value on each worker, now and whenever a worker comes back."""
        with self._lock:
            self._values.add(values)
            for thread in self.threads:
                thread.make(values)
        self.queue.wake()

    def list_values(self) -> list[PerWorkerValues]:
        """Return all per-worker values that somebody can still use, the oldest first."""
        with self._lock:
            return self._list_values()

    def check_all_lost(self, error: WorkerUnavailableError) -> None:
        """Let `join` raise if closures wait, and no worker was there to run them for too long.

        Args:
            error: Why one of the workers was lost.
        """
        with self._lock:
            times = [thread.lost_since for thread in self.threads]
            found = [since for since in times if since is not None]
            if len(found) < len(times) or not self.queue.count_pending():
                return
            # The threads of all workers ask; one error is enough.
            now, since = time.monotonic(), max(found)
            if now - max(since, self._reported) < self.settings.worker_seconds:
                return
            self._reported = now
        self.queue.report_error(make_all_lost_error(now - since, error))

    def stop(self) -> None:
        """Cancel all closures, and let the threads end."""
        self.queue.stop()
        with self._lock:
            self.is_stopped.set()
            threads = list(self.threads)
        for thread in threads:
            thread.stopping.set()

    def join(self, seconds: float) -> None:
        """Wait up to some seconds until the threads have ended."""
        end = time.monotonic() + seconds
        for thread in [*self.others, *(worker.thread for worker in self.threads)]:
            with contextlib.suppress(RuntimeError):  # This thread cannot wait for itself.
                thread.join(max(0.0, end - time.monotonic()))

    def _list_values(self) -> list[PerWorkerValues]:
        return sorted(self._values, key=lambda values: values.order)
