"""`ClosureQueue`: closures that wait for a worker, those that run, and the first error."""

import contextlib
import dataclasses
import threading
from collections import deque
from collections.abc import Callable, Collection

from jaxdist._parameter_server.coordinator.scheduled import Counts, FinishedNumbers, Scheduled
from jaxdist.errors import CancelledError, ContextError

MOST_CLOSURES = 262144


class ClosureQueue:
    """Closures that wait for a worker, those that run, and the first error. Thread-safe.

    Note [First error]
    The first error is kept, later ones are dropped. The next `put`, `wait` or `is_done` raises it:
    first it cancels the closures that wait, asks the workers to stop those that run, and waits
    for these. Meanwhile `put` waits and `put_back` adds nothing, so no other closure begins. Then
    the error is forgotten, and everything works as before.

    Cost:
        A few microseconds for `put`, and for `get` and `finish` together.

    Args:
        most: How many closures may wait; `put` then waits itself.

    Attributes:
        counts: How many closures were scheduled, and what became of them.
        in_flight: The closures that run, by number.
        finished: Which closures are finished.
    """

    def __init__(self, most: int = MOST_CLOSURES) -> None:
        self._most = most
        self._lock = threading.Lock()
        # For threads that wait for a closure, for a free slot, and for closures to finish.
        self._work = threading.Condition(self._lock)
        self._room = threading.Condition(self._lock)
        self._progress = threading.Condition(self._lock)
        self._queued: deque[Scheduled] = deque()
        self._error: BaseException | None = None
        self._is_cancelling = False
        self._is_stopped = False
        self._idle = 0
        self._blocked = 0
        # The numbers that callers of `wait` wait for.
        self._targets: list[int] = []
        self.in_flight: dict[int, Scheduled] = {}
        self.counts = Counts()
        self.finished = FinishedNumbers()

    def put(self, item: Scheduled) -> None:
        """Add a closure, and give it its number.

        Raises:
            BaseException: The first error of an earlier closure. This one is then cancelled too.
            ContextError: `stop` was called.
        """
        with self._lock:
            if self._is_cancelling or len(self._queued) >= self._most:
                self._wait_for_room()
            if self._is_stopped:
                raise ContextError(
                    f"ClusterCoordinator.schedule was called with {item.name} after its workers "
                    "had stopped.\n\nThe threads of workers stop when the process ends.\n\n"
                    "Schedule functions before the main thread ends."
                )
            self.counts.scheduled += 1
            item.number = self.counts.scheduled
            self._queued.append(item)
            if self._error is not None:
                self._raise_error()
            if self._idle:
                self._work.notify()

    def get(
        self, cancel: Callable[[int], None], others: Collection[object] = ()
    ) -> Scheduled | None:
        """Wait for a closure, and return it; it is then in flight.

        Args:
            cancel: Asks the worker to stop the closure with a number.
            others: Other work of the worker.

        Returns:
            The oldest closure; None if there is other work, or after `stop`.
        """
        with self._lock:
            while not self._is_stopped and not others:
                if self._queued:
                    item = self._queued.popleft()
                    item.cancel = cancel
                    self.in_flight[item.number] = item
                    if self._blocked:
                        self._room.notify()
                    return item
                self._idle += 1
                self._work.wait()
                self._idle -= 1
            if self._idle and self._queued:
                # The notification of a new closure may have reached this worker, which is busy.
                self._work.notify()
            return None

    def finish(self, item: Scheduled) -> None:
        """Note that a closure has run."""
        with self._lock:
            self.counts.applied += 1
            self._remove(item)

    def fail(self, item: Scheduled, error: BaseException) -> None:
        """Note that a closure has raised."""
        with self._lock:
            if item.is_cancelled and isinstance(error, CancelledError):
                self.counts.cancelled += 1
            else:
                self.counts.failed += 1
                self._error = self._error or error
            self._remove(item)
            self._progress.notify_all()

    def put_back(self, item: Scheduled) -> bool:
        """Add a closure that was in flight again, as the next one.

        Returns:
            False if closures are being cancelled. The closure then counts as cancelled.
        """
        with self._lock:
            item.cancel = None
            is_cancelled = self._error is not None or self._is_cancelling or self._is_stopped
            if is_cancelled:
                self.counts.cancelled += 1
                self._remove(item)
                return False
            del self.in_flight[item.number]
            self.counts.retried += 1
            self._queued.appendleft(item)
            if self._idle:
                self._work.notify()
            return True

    def wait(self) -> None:
        """Wait until all closures that were put before are finished.

        Raises:
            BaseException: The first error of a closure.
        """
        with self._lock:
            last = self.counts.scheduled
            self._targets.append(last)
            try:
                while self.finished.below <= last and self._error is None:
                    self._progress.wait()
            finally:
                self._targets.remove(last)
            if self._error is not None:
                self._raise_error()

    def is_done(self) -> bool:
        """Whether no closure waits or runs.

        Raises:
            BaseException: The first error of a closure.
        """
        with self._lock:
            if self._error is not None:
                self._raise_error()
            return self.finished.below > self.counts.scheduled

    def read_counts(self) -> tuple[Counts, int]:
        """Return a copy of the counts, and how many closures wait or run."""
        with self._lock:
            return dataclasses.replace(self.counts), len(self._queued) + len(self.in_flight)

    def report_error(self, error: BaseException) -> None:
        """Let the next `put`, `wait` or `is_done` raise an error that is not one of a closure."""
        with self._lock:
            self._error = self._error or error
            self._progress.notify_all()
            self._room.notify_all()

    def wake(self) -> None:
        """Let `get` look at the other work of its workers."""
        with self._lock:
            self._work.notify_all()

    def stop(self) -> None:
        """Cancel all closures, and let `get` return None."""
        with self._lock:
            self._is_stopped = True
            self._drop_queued()
            running = self._mark_cancelled()
            for condition in (self._work, self._room, self._progress):
                condition.notify_all()
        _ask_to_stop(running)

    # The methods below are called by a thread that has the lock.

    def _remove(self, item: Scheduled) -> None:
        """Remove a closure that is in flight, and wake those who wait for it."""
        del self.in_flight[item.number]
        self.finished.add(item.number)
        is_last = self._is_cancelling and not self.in_flight
        if is_last or any(self.finished.below > target for target in self._targets):
            self._progress.notify_all()

    def _wait_for_room(self) -> None:
        self._blocked += 1
        try:
            while not self._is_stopped and (
                self._is_cancelling or (len(self._queued) >= self._most and self._error is None)
            ):
                self._room.wait()
        finally:
            self._blocked -= 1

    def _raise_error(self) -> None:
        """Cancel everything and raise the error, unless another thread raises it meanwhile."""
        while self._is_cancelling:
            self._progress.wait()
        error = self._error
        if error is None:
            return
        self._is_cancelling = True
        try:
            self._drop_queued()
            running = self._mark_cancelled()
            # Without the lock: it may send messages, and closures end meanwhile.
            self._lock.release()
            try:
                _ask_to_stop(running)
            finally:
                self._lock.acquire()
            while self.in_flight:
                self._progress.wait()
            # Ctrl-C while it waits keeps the error for the next call.
            self._error = None
        finally:
            self._is_cancelling = False
            for condition in (self._work, self._room, self._progress):
                condition.notify_all()
        raise error

    def _drop_queued(self) -> None:
        for item in self._queued:
            item.result.set_error(make_cancelled_error(item))
            self.finished.add(item.number)
        self.counts.cancelled += len(self._queued)
        self._queued.clear()

    def _mark_cancelled(self) -> list[Scheduled]:
        running = list(self.in_flight.values())
        for item in running:
            item.is_cancelled = True
        return running


def make_cancelled_error(item: Scheduled) -> CancelledError:
    """Return the error of a closure that will not run."""
    return CancelledError(
        f"{item.describe()} was cancelled. Please reschedule it.\n\n"
        "When a function fails, those that have not finished are cancelled. The next schedule, "
        "join or done raises the error of the one that failed.\n\n"
        "Call ClusterCoordinator.schedule again."
    )


def _ask_to_stop(running: list[Scheduled]) -> None:
    for item in running:
        cancel = item.cancel
        if cancel is not None:
            # A worker that is gone has stopped too.
            with contextlib.suppress(Exception):
                cancel(item.number)
