"""`Workers`: the threads of all workers, and what they share."""

import contextlib
import threading
import time
import weakref
from collections.abc import Iterable

from jaxdist._parameter_server.coordinator.closure_queue import ClosureQueue
from jaxdist._parameter_server.coordinator.fence import Fence
from jaxdist._parameter_server.coordinator.per_worker import PerWorkerValues
from jaxdist._parameter_server.coordinator.protocols import WorkerLink
from jaxdist._parameter_server.coordinator.settings import WaitSettings
from jaxdist._parameter_server.coordinator.worker_thread import WorkerThread


class Workers:
    """The threads of all workers, and what they share.

    It does not refer to the coordinator, so that the threads do not keep it alive.

    Args:
        links: The connections to the workers.
        settings: How long closures wait for servers and workers.

    Attributes:
        queue: The closures.
        fence: The fence of the coordinator.
        threads: One thread for each worker.
    """

    def __init__(self, links: Iterable[WorkerLink], settings: WaitSettings) -> None:
        self.settings = settings
        self.queue = ClosureQueue()
        self.fence = Fence()
        self.threads: list[WorkerThread] = []
        self._values: weakref.WeakSet[PerWorkerValues] = weakref.WeakSet()
        self._lock = threading.Lock()
        for link in links:
            self.add(link)

    def add(self, link: WorkerLink) -> None:
        """Start the thread of a worker; it makes all per-worker values first."""
        with self._lock:
            thread = WorkerThread(link, self.queue, self.fence, self.settings, self)
            self.threads.append(thread)
            thread.make_again(self._list_values())
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

    def are_all_lost(self) -> bool:
        """Whether no worker can run a closure."""
        return all(thread.lost_since is not None for thread in list(self.threads))

    def stop(self) -> None:
        """Cancel all closures, and let the threads end."""
        self.queue.stop()
        for thread in list(self.threads):
            thread.stopping.set()

    def join(self, seconds: float) -> None:
        """Wait up to some seconds until the threads have ended."""
        end = time.monotonic() + seconds
        for thread in list(self.threads):
            with contextlib.suppress(RuntimeError):  # This thread cannot wait for itself.
                thread.thread.join(max(0.0, end - time.monotonic()))

    def _list_values(self) -> list[PerWorkerValues]:
        return sorted(self._values, key=lambda values: values.order)
