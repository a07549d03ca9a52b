"""Collects signals to the launcher."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Sequence

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Signals:
    """The signals that have arrived; each one wakes a selector.

    Attributes:
        received: Their numbers, in order.
        wake: A file descriptor that becomes readable when a signal arrives.
        forwarded: How many of them were forwarded to the processes.
    """

    def __init__(self, wake: int) -> None:
        self.received: list[int] = []
        self.wake = wake
        self.forwarded = 0

    def clear(self) -> None:
        """Empty the pipe that wakes the selector."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.wake, 4096)


@contextlib.contextmanager
def collect_signals(numbers: Sequence[int] = FORWARDED) -> Iterator[Signals]:
    """Collect signals instead of acting on them, until the block ends.

    Python allows this only in the main thread; in other threads no signal is collected. A signal
    that is ignored (by `nohup`, or in the background of a script) stays ignored.
    """
    wake, woken = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(woken, False)
    signals = Signals(wake)
    before: dict[int, object] = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for number in numbers:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    # `set_wakeup_fd` would wake the selector before the number is in the list.
                    before[number] = signal.signal(
                        number, lambda n, _: (signals.received.append(n), os.write(woken, b"x"))
                    )
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)  # pyrefly: ignore[bad-argument-type]
        os.close(wake)
        os.close(woken)
