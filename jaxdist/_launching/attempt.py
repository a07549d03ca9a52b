"""One attempt: all processes of a job, from their start to the end of the last one."""

import contextlib
import dataclasses
import os
import pathlib
import selectors
import time
from collections.abc import Callable, Iterator

from jaxdist._launching.child import End, write_end
from jaxdist._launching.signals import AnyChild, Signals, end_all

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


class Attempt:
    """The processes of one attempt.

    Args:
        count: Number of processes.
        start: Starts the process with a given number.
        folder: Where the launcher writes how each process ended.
        signals: Signals to the launcher.
        patience: How long the launcher waits.
    """

    def __init__(
        self,
        count: int,
        start: Callable[[int], AnyChild],
        folder: pathlib.Path,
        signals: Signals,
        patience: Patience,
    ) -> None:
        self._count, self._start, self._folder = count, start, folder
        self._signals, self._patience = signals, patience
        self._children: list[AnyChild] = []
        self._selector = selectors.DefaultSelector()
        self._ask_at: float | None = None
        self._kill_at: float | None = None
        self.late: tuple[int, ...] = ()

    def run(self) -> list[End]:
        """Run all processes until they end; return their ends, the earliest first.

        `late` then holds the processes that were still running when the time of the job was over.
        """
        ends: list[End] = []
        with self._selector, contextlib.ExitStack() as stack:
            self._selector.register(self._signals.wake, selectors.EVENT_READ, None)
            # Leave no process running, even when the launcher itself fails.
            stack.callback(lambda: end_all(self._running()))
            for index in range(self._count):
                self._children.append(self._start(index))
                self._watch(self._children[-1], stack)
            over = None if self._patience.job is None else time.monotonic() + self._patience.job
            while self._running():
                self._wait(over)
                self._signals.forward(self._running())
                ends += self._collect()
                now = time.monotonic()
                if over is not None and now > over and not self.late:
                    self.late = tuple(child.index for child in self._running())
                    self._ask_at = self._kill_at = now
                self._end_the_rest(now)
        return ends

    def _running(self) -> list[AnyChild]:
        return [child for child in self._children if child.end is None]

    def _watch(self, child: AnyChild, stack: contextlib.ExitStack) -> None:
        for pipe in child.streams:
            self._selector.register(pipe, selectors.EVENT_READ, child)
        ended = child.open_end()
        if ended is not None:
            stack.callback(os.close, ended)
            self._selector.register(ended, selectors.EVENT_READ, child)

    def _wait(self, over: float | None) -> None:
        """Wait until something happens or a time is over, and write new output."""
        times = [t for t in (over, self._ask_at, self._kill_at) if t is not None]
        naps = [] if hasattr(os, "pidfd_open") else [_NAP]
        # A second at most, for a process that has no `pidfd` for lack of permission.
        nap = min([1.0, *naps, *(max(0.0, t - time.monotonic()) for t in times)])
        for key, _ in self._selector.select(nap):
            child = key.data
            if child is None:
                self._signals.clear()
            elif isinstance(key.fileobj, int):
                self._selector.unregister(key.fileobj)
            elif not child.read(key.fileobj):
                self._selector.unregister(key.fileobj)

    def _collect(self) -> Iterator[End]:
        for child in self._running():
            end = child.collect(self._folder)
            if end is None:
                continue
            for pipe in child.streams:
                with contextlib.suppress(KeyError, ValueError):
                    self._selector.unregister(pipe)
            if not end.was_ended:
                write_end(self._folder, end)
                for other in self._running():
                    other.hear(end)
            failed = end.code != 0 and not end.was_ended
            # After a signal, each process may take the time that it needs, for instance to save.
            if failed and self._ask_at is None and not self._signals.forwarded:
                self._ask_at = time.monotonic() + self._patience.report
            yield end

    def _end_the_rest(self, now: float) -> None:
        if self._ask_at is not None and now >= self._ask_at:
            for child in self._running():
                child.ask_to_end()
            self._ask_at = float("inf")
            self._kill_at = self._kill_at or now + self._patience.grace
        if self._kill_at is not None and now >= self._kill_at:
            for child in self._running():
                child.kill()
            self._kill_at = float("inf")
