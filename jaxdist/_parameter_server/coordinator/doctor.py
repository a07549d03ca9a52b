"""`ClosureDoctor`: a thread that reports closures that do not finish."""

import logging
import queue
import threading
import time

from jaxdist._parameter_server.coordinator.workers import Workers
from jaxdist._processes import format_stack

_LOG = logging.getLogger("jaxdist")
_BEAT_SECONDS = 1.0


class ClosureDoctor:
    """A thread that reports when no closure has finished for `quiet_seconds`, once for each hang.

    It also stops the threads of the workers. The garbage collector deletes the coordinator in any
    thread, also in one that has the lock of the queue, so it can only leave a message.

    Args:
        workers: The threads of all workers.

    Attributes:
        messages: Anything that is put here ends the threads of the workers, and this one.
    """

    def __init__(self, workers: Workers) -> None:
        # Unlike that of `queue.Queue`, its `put` may be called by the garbage collector.
        self.messages: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._workers = workers
        self._quiet = workers.settings.quiet_seconds
        self._finished = -1
        self._since = time.monotonic()
        self._is_reported = False
        self.thread = threading.Thread(target=self._watch, name="jaxdist-closures", daemon=True)

    def _watch(self) -> None:
        beat = min(_BEAT_SECONDS, self._quiet / 4)
        while True:
            try:
                self.messages.get(timeout=beat)
            except queue.Empty:
                if self._workers.is_stopped.is_set():
                    return
                self._check()
            else:
                self._workers.stop()
                return

    def _check(self) -> None:
        now = time.monotonic()
        counts, pending = self._workers.queue.read_counts()
        finished = counts.applied + counts.failed + counts.cancelled
        if finished != self._finished or not pending:
            self._finished, self._since, self._is_reported = finished, now, False
        elif now - self._since >= self._quiet and not self._is_reported:
            self._is_reported = True
            _LOG.warning("%s", self.describe(now - self._since, pending))

    def describe(self, seconds: float, pending: int) -> str:
        """Return a report of what each worker does.

        Args:
            seconds: How long no closure has finished.
            pending: How many closures wait or run.
        """
        lines = [f"No function has finished for {seconds:.1f} s, and {pending} wait or run."]
        now = time.monotonic()
        for worker in list(self._workers.threads):
            running, lost = worker.running, worker.lost_since
            name = f"Worker {worker.link.index}"
            if running is not None:
                item, since = running
                stack = format_stack(worker.thread.ident or 0).rstrip()
                lines.append(
                    f"{name} has been running {item.describe()} for {now - since:.1f} s:\n{stack}"
                )
            elif lost is not None:
                lines.append(f"{name} was lost {now - lost:.1f} s ago.")
            else:
                lines.append(f"{name} runs no function.")
        return "\n".join(lines)
