"""The threads of all workers: each takes closures from the queue, and runs them on its worker."""

import contextlib
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable

from jaxdist._parameter_server.coordinator import retries
from jaxdist._parameter_server.coordinator.closure_queue import ClosureQueue, make_cancelled_error
from jaxdist._parameter_server.coordinator.per_worker import PerWorkerValues
from jaxdist._parameter_server.coordinator.protocols import Joining, WorkerLink
from jaxdist._parameter_server.coordinator.retries import Backoff, WaitSettings, first_line
from jaxdist._parameter_server.coordinator.scheduled import Scheduled
from jaxdist._parameter_server.variables.servers import Fence
from jaxdist._parameter_server.worker.datasets import find_line
from jaxdist._parameter_server.worker.worker_index import set_worker_index
from jaxdist.errors import (
    CancelledError,
    DeadlineExceededError,
    JaxdistError,
    PSUnavailableError,
    WorkerUnavailableError,
)

_LOG = logging.getLogger("jaxdist")
_ASK_SECONDS = 0.5
_NAP = 0.05
# Errors that the closure did not cause: it runs again.
_OF_SERVERS = (PSUnavailableError, DeadlineExceededError)
_PERIOD_SECONDS = 1.0


class WorkerThread:
    """Takes closures from the queue, and runs them on one worker, one at a time.

    When the worker is lost, its closure goes back to the queue, and the thread waits for the worker
    and makes its per-worker values again. The other workers continue.

    Args:
        link: The connection to the worker.
        fleet: All workers.

    Attributes:
        running: The closure that runs, and since when; None between closures.
        lost_since: When the worker was lost; None while it is not.
        stopping: Set when the thread has to end.
    """

    def __init__(self, link: WorkerLink, fleet: "Workers") -> None:
        self.link = link
        self.running: tuple[Scheduled, float] | None = None
        self.lost_since: float | None = None
        self.stopping = threading.Event()
        self._queue, self._fleet = fleet.queue, fleet
        # Values that this worker has to make. Weak: nobody may need them any more.
        self._to_make: deque[weakref.ref[PerWorkerValues]] = deque()
        self._backoff = Backoff()
        self.thread = threading.Thread(
            target=self._work, name=f"jaxdist-worker-{link.index}", daemon=True
        )

    def make(self, values: PerWorkerValues) -> None:
        """Make a value on this worker before the next closure."""
        self._to_make.append(weakref.ref(values))

    def _work(self) -> None:
        # A thread has a context of its own, so this holds for all that it runs.
        set_worker_index(self.link.index)
        while not self.stopping.is_set():
            item = self._queue.get(self.link.cancel, self._to_make)
            if item is not None:
                self._run(item)
            elif self._to_make:
                self._make_values()
            # Do not keep the last closure and its result alive while waiting for the next one.
            item = None

    def _run(self, item: Scheduled) -> None:
        index = self.link.index
        self.running = (item, time.monotonic())
        try:
            if item.is_cancelled:
                raise make_cancelled_error(item)
            for values in item.inputs:
                values.of(index)
            fence, done_below = self._fleet.fence.value, self._queue.finished.below
            with item.settings.use():
                results = self.link.run(item.closure, item.number, fence, done_below)
        except WorkerUnavailableError as error:
            self._put_back(item, retries.note_lost_worker(item, index, error, self._fleet.settings))
            self._wait_for_worker(error)
        except _OF_SERVERS as error:
            if self._put_back(item, retries.note_server(item, index, error, self._fleet.settings)):
                self._pause()
        except BaseException as error:  # Also SystemExit of a closure: join raises it.
            self._fail(item, error)
        else:
            self._backoff.reset()
            # First the queue: who has the result can rely on what the queue counts.
            self._queue.finish(item)
            item.result.set_value(results)
        finally:
            self.running = None

    def _put_back(self, item: Scheduled, error: BaseException | None) -> bool:
        """Put a closure back; or fail it, if the error says that it was tried often enough."""
        self.running = None
        if error is not None:
            self._fail(item, error)
            return False
        if not self._queue.put_back(item):
            item.result.set_error(make_cancelled_error(item))
            return False
        return True

    def _fail(self, item: Scheduled, error: BaseException) -> None:
        if item.is_cancelled and isinstance(error, CancelledError):
            error = make_cancelled_error(item)
        if isinstance(error, JaxdistError) and find_line(error) is None:
            # Of another process: the frames of this thread say nothing about it.
            error.__traceback__ = None
        self._queue.fail(item, error)
        item.result.set_error(error)

    def _pause(self) -> None:
        """Wait a little, longer each time, before a server is asked again."""
        self.stopping.wait(self._backoff.find_next())

    def _wait_for_worker(self, error: WorkerUnavailableError) -> None:
        """Wait until the worker is back, and let it make its values again."""
        index = self.link.index
        since = self.lost_since = time.monotonic()
        _LOG.warning("Worker %d was lost: %s The others continue.", index, first_line(error))
        while not self.stopping.is_set() and not self._ask_for_worker():
            self._fleet.check_all_lost(error)
        # First what is made from now on, then what was made before: so no value is left out.
        self._to_make.clear()
        for values in self._fleet.list_values():
            values.forget(index)
            self.make(values)
        self.lost_since = None
        if not self.stopping.is_set():
            _LOG.warning("Worker %d is back after %.1f s.", index, time.monotonic() - since)

    def _ask_for_worker(self) -> bool:
        began = time.monotonic()
        try:
            if self.link.wait_until_back(_ASK_SECONDS):
                return True
        except Exception as error:
            # Whatever is wrong with the connection, the worker is not back.
            _LOG.info("Worker %d is not back: %s", self.link.index, first_line(error))
        # A link may answer at once.
        self.stopping.wait(max(0.0, _NAP - (time.monotonic() - began)))
        return False

    def _make_values(self) -> None:
        """Make the first value of those that this worker has to make."""
        try:
            values = self._to_make.popleft()()
        except IndexError:
            return
        if values is None or values.has(self.link.index):
            return
        index = self.link.index
        began = time.monotonic()
        while not self.stopping.is_set():
            try:
                with values.settings.use():
                    made = self.link.create_resource(values.what_to_make(index))
                values.set(index, made)
                self._backoff.reset()
                return
            except WorkerUnavailableError as error:
                self._wait_for_worker(error)
                return
            except _OF_SERVERS as error:
                if time.monotonic() - began >= self._fleet.settings.server_seconds:
                    values.set_error(index, error)
                    return
                self._pause()
            except BaseException as error:
                values.set_error(index, error)
                return


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
            thread = WorkerThread(link, self)
            self.threads.append(thread)
            for values in self._list_values():
                thread.make(values)
        thread.thread.start()

    def create(self, values: PerWorkerValues) -> None:
        """Make a value on each worker, now and whenever a worker comes back."""
        with self._lock:
            self._values.add(values)
            for thread in self.threads:
                thread.make(values)
        self.queue.wake()

    def list_values(self) -> list[PerWorkerValues]:
        """Return all per-worker values that are still in use, the oldest first."""
        with self._lock:
            return self._list_values()

    def check_all_lost(self, error: WorkerUnavailableError) -> None:
        """Let `join` raise if closures wait, and all workers have been lost for too long.

        Args:
            error: Why one of the workers was lost.
        """
        with self._lock:
            times = [thread.lost_since for thread in self.threads]
            found = [since for since in times if since is not None]
            if len(found) < len(times) or not self.queue.read_counts()[1]:
                return
            # The threads of all workers ask; one error is enough.
            now, since = time.monotonic(), max(found)
            if now - max(since, self._reported) < self.settings.worker_seconds:
                return
            self._reported = now
        self.queue.report_error(retries.make_all_lost_error(now - since, error))

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


def add_new_workers(workers: Workers, joining: Joining) -> None:
    """Ask once a second for workers that have announced themselves, until all threads stop.

    Args:
        workers: The threads of all workers, to which those of new ones are added.
        joining: Finds the new ones.
    """
    while not workers.is_stopped.wait(_PERIOD_SECONDS):
        for link in joining.find_new():
            workers.add(link)
            _LOG.warning("Worker %d has joined, and takes functions now.", link.index)
