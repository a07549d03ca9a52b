"""Collects signals to the launcher, forwards them, and ends its processes."""

import contextlib
import os
import pathlib
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any, Protocol

from jaxdist._launching.child import End

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class AnyChild(Protocol):
    """A process, on this machine or elsewhere; `Child` documents the methods."""

    index: int
    end: End | None

    @property
    def streams(self) -> Mapping[IO[bytes], Any]: ...
    def open_end(self) -> int | None: ...
    def read(self, pipe: IO[bytes]) -> bool: ...
    def signal(self, number: int, *, to_group: bool = False) -> None: ...
    def ask_to_end(self) -> None: ...
    def kill(self) -> None: ...
    def hear(self, end: End) -> None: ...
    def collect(self, folder: pathlib.Path) -> End | None: ...
    def abandon(self) -> None: ...


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

    def forward(self, running: Sequence[AnyChild], first: Sequence[AnyChild] | None = None) -> bool:
        """Forward new signals: the first one as it is; later ones kill the processes.

        Args:
            running: The processes that run.
            first: Those that get the first signal; all of them by default.

        Returns:
            Whether there were new signals.
        """
        new = self.received[self.forwarded :]
        for number in new:
            self.forwarded += 1
            if self.forwarded > 1:
                for child in running:
                    child.kill()
            else:
                for child in running if first is None else first:
                    # A terminal sends Ctrl-C to all processes of a group; other signals go to one.
                    child.signal(number, to_group=number == signal.SIGINT)
        return bool(new)


def end_all(running: Sequence[AnyChild]) -> None:
    """Kill processes, and wait until they have ended. Their last output is not read."""
    for child in running:
        child.kill()
    for child in running:
        child.abandon()


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
