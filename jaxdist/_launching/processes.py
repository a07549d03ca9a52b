"""The running processes of a job: waits for them, forwards signals to them, and ends them."""

import contextlib
import dataclasses
import math
import os
import selectors
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any, Protocol

from jaxdist._launching.child import End
from jaxdist._launching.signals import Signals

_NAP = 0.02  # used where the system cannot report at once that a process has ended


@dataclasses.dataclass(frozen=True)
class Patience:
    """How long the launcher waits when a process has failed, in seconds.

    Args:
        report: For the other processes to report what they found, save what they have, and end.
        grace: Between SIGTERM and SIGKILL.
        job: For the whole job; None for no limit.
    """

    report: float = 10.0
    grace: float = 5.0
    job: float | None = None


class AnyChild(Protocol):
    """A process, on this machine or elsewhere; `Child` documents the methods."""

    index: int
    end: End | None

    @property
    def streams(self) -> Mapping[IO[bytes], Any]: ...
    def read(self, pipe: IO[bytes]) -> bool: ...
    def signal(self, number: int, *, to_group: bool = False) -> None: ...
    def ask_to_end(self) -> None: ...
    def kill(self) -> None: ...
    def hear(self, end: End) -> None: ...
    def collect(self) -> End | None: ...
    def abandon(self) -> None: ...


class Processes:
    """The processes that the launcher has started and that have not ended.

    It knows nothing of the job: who starts them decides what follows when one of them ends. When
    the block of a `with` statement ends, no process is left, even if the launcher itself failed.

    Args:
        signals: Signals to the launcher.
        grace: Seconds between SIGTERM and SIGKILL.

    Attributes:
        running: The processes.
        ask_at: When they are asked to end, by `time.monotonic`.
        kill_at: When they are killed.
    """

    def __init__(self, signals: Signals, grace: float) -> None:
        self.running: list[AnyChild] = []
        self.ask_at = self.kill_at = math.inf
        self._signals, self._grace = signals, grace
        self._selector = selectors.DefaultSelector()
        self._selector.register(signals.wake, selectors.EVENT_READ, None)

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *_: object) -> None:
        """Kill the processes, and wait until they have ended. Their last output is not read."""
        self._selector.close()
        self.kill()
        for child in self.running:
            child.abandon()

    def add(self, child: AnyChild) -> None:
        """Wait for a further process, too."""
        self.running.append(child)
        for pipe in child.streams:
            self._selector.register(pipe, selectors.EVENT_READ, child)

    def ask_to_end(self) -> None:
        """Ask the processes to end; those that run when the grace is over are killed."""
        self.ask_at, self.kill_at = math.inf, time.monotonic() + self._grace
        for child in self.running:
            child.ask_to_end()

    def kill(self) -> None:
        """Kill the processes."""
        self.kill_at = math.inf
        for child in self.running:
            child.kill()

    def wait(
        self, until: float = math.inf, first: Sequence[AnyChild] | None = None
    ) -> Iterator[tuple[AnyChild, End]]:
        """Wait until something happens, write new output, and return the processes that ended.

        The first signal to the launcher is forwarded as it is; later ones kill the processes.

        Args:
            until: When to return at the latest.
            first: Those that get the first signal; all processes by default.
        """
        now = time.monotonic()
        if now >= self.ask_at:
            self.ask_to_end()
        if now >= self.kill_at:
            self.kill()
        # A second at most, for a process that has no `pidfd` for lack of permission.
        most = 1.0 if hasattr(os, "pidfd_open") else _NAP
        nap = max(0.0, min(until, self.ask_at, self.kill_at) - now)
        for key, _ in self._selector.select(min(nap, most)):
            if key.data is None:
                self._signals.clear()
            elif not key.data.read(key.fileobj):
                self._selector.unregister(key.fileobj)
        self._forward_signals(self.running if first is None else first)
        return self._collect()

    def _collect(self) -> Iterator[tuple[AnyChild, End]]:
        for child in tuple(self.running):
            end = child.collect()
            if end is None:
                continue
            self.running.remove(child)
            for pipe in child.streams:
                with contextlib.suppress(KeyError, ValueError):
                    self._selector.unregister(pipe)
            yield child, end

    def _forward_signals(self, first: Sequence[AnyChild]) -> None:
        for number in self._signals.received[self._signals.forwarded :]:
            self._signals.forwarded += 1
            if self._signals.forwarded > 1:
                self.kill()
                continue
            for child in first:
                # A terminal sends Ctrl-C to all processes of a group; other signals go to one.
                child.signal(number, to_group=number == signal.SIGINT)
