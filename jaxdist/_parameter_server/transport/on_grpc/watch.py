"""`Watch`: ends calls that send or take their bytes too slowly."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator


class Watch:
    """One thread that looks after all calls of a listener.

    Args:
        seconds: How long a call may take to send a message, or to receive one.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._cancels: dict[object, tuple[float, Callable[[], object]]] = {}
        self._changed = threading.Condition()
        self._is_running = self._is_closed = False

    def close(self) -> None:
        """End the thread. The calls that are left have been cancelled."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    @contextlib.contextmanager
    def limit(self, cancel: Callable[[], object]) -> Iterator[None]:
        """Call `cancel` if the block takes longer than it may."""
        key = object()
        with self._changed:
            self._cancels[key] = time.monotonic() + self._seconds, cancel
            if not self._is_running and not self._is_closed:
                self._is_running = True
                threading.Thread(target=self._run, name="slow calls", daemon=True).start()
        try:
            yield
        finally:
            # No notification: the thread wakes up at its time, and finds nothing.
            with self._changed:
                self._cancels.pop(key, None)

    def _run(self) -> None:
        idle = False
        while True:
            with self._changed:
                if self._is_closed or (not self._cancels and idle):
                    self._is_running = False
                    return
                idle = not self._cancels
                # All limits are equally long, so the first that was added ends first.
                first = next(iter(self._cancels.values()), None)
                now = time.monotonic()
                wait = self._seconds if first is None else first[0] - now
                if wait > 0:
                    self._changed.wait(min(wait, 10.0))
                    continue
                late = [key for key, (end, _) in self._cancels.items() if end <= now]
                cancels = [self._cancels.pop(key)[1] for key in late]
            for cancel in cancels:
                cancel()
