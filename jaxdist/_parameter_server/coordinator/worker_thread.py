"""`WorkerThread`: takes closures from the queue, and runs them on one worker."""

import logging
import threading
import time
import weakref
from collections import deque
from typing import Protocol

from jaxdist._parameter_server.coordinator import retries
from jaxdist._parameter_server.coordinator.closure_queue import ClosureQueue, make_cancelled_error
from jaxdist._parameter_server.coordinator.per_worker import PerWorkerValues
from jaxdist._parameter_server.coordinator.protocols import WorkerLink
from jaxdist._parameter_server.coordinator.scheduled import Scheduled
from jaxdist._parameter_server.coordinator.settings import WaitSettings
from jaxdist._parameter_server.variables.servers import Fence
from jaxdist._parameter_server.worker.dataset_errors import find_line
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
_FIRST_PAUSE = 0.02
_LONGEST_PAUSE = 0.25
# What the closure is not to blame for: it runs again.
_OF_SERVERS = (PSUnavailableError, DeadlineExceededError)


class Fleet(Protocol):
    """The other workers."""

    def list_values(self) -> list[PerWorkerValues]:
        """Return all per-worker values that somebody can still use, the oldest first."""
        ...

    def check_all_lost(self, error: WorkerUnavailableError) -> None:
        """Let `join` raise if closures wait, and no worker was there to run them for too long."""
        ...


class WorkerThread:
    """Takes closures from the queue, and runs them on one worker, one at a time.

    When the worker is lost, its closure goes back to the queue, and the thread waits for the worker
    and makes its per-worker values again. The other workers go on.

    Args:
        link: The connection to the worker.
        queue: The closures.
        fence: The fence of the coordinator.
        settings: How long closures wait for servers and workers.
        fleet: The other workers.

    Attributes:
        running: The closure that runs, and since when; None between closures.
        lost_since: When the worker was lost; None while it is not.
        stopping: Set when the thread has to end.
    """

    def __init__(
        self,
        link: WorkerLink,
        queue: ClosureQueue,
        fence: Fence,
        settings: WaitSettings,
        fleet: Fleet,
    ) -> None:
        self.link = link
        self.running: tuple[Scheduled, float] | None = None
        self.lost_since: float | None = None
        self.stopping = threading.Event()
        self._queue = queue
        self._fence = fence
        self._settings = settings
        self._fleet = fleet
        # Values that this worker has to make. Weak: nobody may need them any more.
        self._to_make: deque[weakref.ref[PerWorkerValues]] = deque()
        self._pauses = 0
        self.thread = threading.Thread(
            target=self._work, name=f"jaxdist-worker-{link.index}", daemon=True
        )

    def start(self) -> None:
        """Start the thread."""
        self.thread.start()

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
            results = self.link.run(
                item.closure, item.number, self._fence.value, self._queue.finished.below
            )
        except WorkerUnavailableError as error:
            self._put_back(item, retries.note_lost_worker(item, index, error, self._settings))
            self._wait_for_worker(error)
        except _OF_SERVERS as error:
            if self._put_back(item, retries.note_server(item, index, error, self._settings)):
                self._pause()
        except BaseException as error:  # Also SystemExit of a closure: join raises it.
            self._fail(item, error)
        else:
            self._pauses = 0
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
        self.stopping.wait(min(_FIRST_PAUSE * 2**self._pauses, _LONGEST_PAUSE))
        self._pauses = min(self._pauses + 1, 16)

    def _wait_for_worker(self, error: WorkerUnavailableError) -> None:
        """Wait until the worker is back, and let it make its values again."""
        index = self.link.index
        since = self.lost_since = time.monotonic()
        _LOG.warning("Worker %d was lost: %s The others go on.", index, _first_line(error))
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
            _LOG.info("Worker %d is not back: %s", self.link.index, _first_line(error))
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
                values.set(index, self.link.create_resource(values.what_to_make(index)))
                self._pauses = 0
                return
            except WorkerUnavailableError as error:
                self._wait_for_worker(error)
                return
            except _OF_SERVERS as error:
                if time.monotonic() - began >= self._settings.server_seconds:
                    values.set_error(index, error)
                    return
                self._pause()
            except BaseException as error:
                values.set_error(index, error)
                return


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
