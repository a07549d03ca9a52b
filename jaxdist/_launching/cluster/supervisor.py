"""`Supervisor`: starts the tasks of a cluster, and restarts those that are killed."""

import contextlib
import dataclasses
import os
import pathlib
import selectors
import time
from collections.abc import Callable, Sequence

from jaxdist._launching.attempt import Patience
from jaxdist._launching.child import End, name_signal
from jaxdist._launching.cluster.environment import FINISHED
from jaxdist._launching.output import say
from jaxdist._launching.signals import AnyChild, Signals, end_all

_NAP = 0.02  # used where the system cannot report at once that a process has ended
# A task that is killed this many times in a row, each time within `_SOON` seconds of its start, is
# not started again.
_MOST_KILLS = 5
_SOON = 10.0


@dataclasses.dataclass
class Task:
    """One task of the cluster.

    Args:
        job: `chief`, `ps`, `worker` or `evaluator`.
        index: Its number.
        start: Starts it; takes the number of its starts, including this one.
        folder: Where it records an error for the launcher.
    """

    job: str
    index: int
    start: Callable[[int], AnyChild]
    folder: pathlib.Path
    child: AnyChild | None = None
    starts: int = 0
    started: float = 0.0
    soon: int = 0

    @property
    def name(self) -> str:
        """Its job and number, such as `ps 0`."""
        return f"{self.job} {self.index}"


class Supervisor:
    """Runs the tasks until the chief ends, and then the evaluator, if any, until it ends.

    Args:
        tasks: The tasks.
        signals: Signals to the launcher.
        patience: How long the launcher waits.
        restarts: How often the chief may be started again after a failure.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        signals: Signals,
        patience: Patience,
        restarts: int,
    ) -> None:
        self._tasks, self._signals = list(tasks), signals
        self._patience, self._restarts = patience, restarts
        self._selector = selectors.DefaultSelector()
        self._code: int | None = None
        # Whether the chief has ended well while the evaluator still runs.
        self._is_trained = False
        self._kill_at: float | None = None

    def run(self) -> int:
        """Run the tasks to the end, and return the exit code."""
        with self._selector, contextlib.ExitStack() as stack:
            self._selector.register(self._signals.wake, selectors.EVENT_READ, None)
            # Leave no process running, even when the launcher itself fails.
            stack.callback(lambda: end_all(self._running()))
            for task in self._tasks:
                self._start(task)
            while self._running():
                self._wait()
                if self._signals.forward(self._running(), self._find_chief()):
                    self._kill_at = self._kill_at or time.monotonic() + self._patience.grace
                    if not self._find_chief():
                        self._finish(1)
                self._collect()
                if self._kill_at is not None and time.monotonic() >= self._kill_at:
                    for child in self._running():
                        child.kill()
                    self._kill_at = float("inf")
        if self._signals.received:
            number = self._signals.received[0]
            say(f"ended by {name_signal(number)}; no process is left.")
            return 128 + number
        return self._code or 0

    def _running(self) -> list[AnyChild]:
        return [t.child for t in self._tasks if t.child is not None and t.child.end is None]

    def _find_chief(self) -> list[AnyChild]:
        """Return the chief, if it runs. Only the chief gets a signal; others are asked to end."""
        found = [t.child for t in self._tasks if t.job == "chief" and t.child is not None]
        return [child for child in found if child.end is None]

    def _start(self, task: Task) -> None:
        task.starts += 1
        task.started = time.monotonic()
        child = task.child = task.start(task.starts)
        for pipe in child.streams:
            self._selector.register(pipe, selectors.EVENT_READ, child)
        ended = child.open_end()
        if ended is not None:
            self._selector.register(ended, selectors.EVENT_READ, child)

    def _wait(self) -> None:
        """Wait until something happens, and write new output."""
        nap = 1.0 if hasattr(os, "pidfd_open") else _NAP
        if self._kill_at is not None:
            nap = min(nap, max(0.0, self._kill_at - time.monotonic()))
        for key, _ in self._selector.select(nap):
            child = key.data
            if child is None:
                self._signals.clear()
            elif isinstance(key.fileobj, int):
                self._selector.unregister(key.fileobj)
                os.close(key.fileobj)
            elif not child.read(key.fileobj):
                self._selector.unregister(key.fileobj)

    def _collect(self) -> None:
        for task in self._tasks:
            child = task.child
            if child is None or child.end is not None:
                continue
            end = child.collect(task.folder)
            if end is None:
                continue
            for pipe in child.streams:
                with contextlib.suppress(KeyError, ValueError):
                    self._selector.unregister(pipe)
            if self._code is None and not self._signals.forwarded:
                self._decide(task, end)
            elif self._code is None and task.job == "chief":
                self._finish(end.exit_code)

    def _decide(self, task: Task, end: End) -> None:
        """Start a task again, or end the job."""
        if task.job == "chief":
            self._decide_for_chief(task, end)
            return
        if self._is_trained and task.job != "evaluator":
            return
        has_finished = task.job == "evaluator" or (task.folder / FINISHED).exists()
        if end.code == 0 and has_finished:
            if self._is_trained:
                self._finish(0)
            return
        is_killed = end.code < 0
        task.soon = task.soon + 1 if time.monotonic() - task.started < _SOON else 0
        if is_killed and task.soon < _MOST_KILLS:
            say(f"{task.name} was ended by {end.describe()}, and is started again.")
            self._start(task)
            return
        if end.code == 0:
            hint = (
                " Tasks of the jobs ps and worker run until the chief ends: let the script call "
                "jaxdist.Server(...).join() in them."
            )
        elif is_killed:
            hint = f" It was killed {task.soon} times within {_SOON:g} s of its start."
        else:
            hint = ""
        when = "when the chief had ended" if self._is_trained else "while the chief ran"
        say(f"{task.name} ended with {end.describe()} {when}.{hint}")
        self._finish(end.exit_code or 1)

    def _decide_for_chief(self, task: Task, end: End) -> None:
        if end.code != 0 and task.starts <= self._restarts:
            say(
                f"the chief ended with {end.describe()}. Restart {task.starts} of "
                f"{self._restarts}: it is started again, and the others go on."
            )
            self._start(task)
            return
        if end.code != 0:
            say(f"the chief ended with {end.describe()}.")
        running = [t for t in self._tasks if t.child is not None and t.child.end is None]
        if end.code == 0 and any(t.job == "evaluator" for t in running):
            self._is_trained = True
            for other in running:
                if other.job != "evaluator" and other.child is not None:
                    other.child.ask_to_end()
            return
        self._finish(end.exit_code)

    def _finish(self, code: int) -> None:
        """End the tasks that still run; parameter servers write a last snapshot."""
        self._code = code
        for child in self._running():
            child.ask_to_end()
        self._kill_at = time.monotonic() + self._patience.grace
