"""`Supervisor`: starts the tasks of a cluster, and restarts those that are killed."""

import dataclasses
import pathlib
import time
from collections.abc import Callable, Sequence

from jaxdist._launching.child import End, name_signal
from jaxdist._launching.cluster.environment import FINISHED
from jaxdist._launching.output import say
from jaxdist._launching.processes import AnyChild, Patience, Processes
from jaxdist._launching.signals import Signals

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
        self._tasks, self._signals, self._restarts = tasks, signals, restarts
        self._processes = Processes(signals, patience.grace)
        self._grace = patience.grace
        self._code: int | None = None
        # Whether the chief has ended well while the evaluator still runs.
        self._is_trained = False

    def run(self) -> int:
        """Run the tasks to the end, and return the exit code."""
        with self._processes:
            for task in self._tasks:
                self._start(task)
            while self._processes.running:
                self._wait()
        if self._signals.received:
            number = self._signals.received[0]
            say(f"ended by {name_signal(number)}; no process is left.")
            return 128 + number
        return self._code or 0

    def _wait(self) -> None:
        before = self._signals.forwarded
        # Only the chief gets a signal; others are asked to end.
        ended = self._processes.wait(first=self._list_running("chief"))
        if self._signals.forwarded > before:
            deadline = time.monotonic() + self._grace
            self._processes.kill_at = min(self._processes.kill_at, deadline)
            if not self._list_running("chief"):
                self._finish(1)
        for child, end in ended:
            task = next(task for task in self._tasks if task.child is child)
            if self._code is None and not self._signals.forwarded:
                self._decide(task, end)
            elif self._code is None and task.job == "chief":
                self._finish(end.exit_code)

    def _list_running(self, job: str) -> list[AnyChild]:
        running = self._processes.running
        return [task.child for task in self._tasks if task.job == job and task.child in running]

    def _start(self, task: Task) -> None:
        task.starts += 1
        task.started = time.monotonic()
        task.child = task.start(task.starts)
        self._processes.add(task.child)
        # What ends at the same time is decided in the order of the tasks: the chief comes last.
        order = {id(each.child): number for number, each in enumerate(self._tasks)}
        self._processes.running.sort(key=lambda child: order[id(child)])

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
                f"{self._restarts}: it is started again, and the others continue."
            )
            self._start(task)
            return
        if end.code != 0:
            say(f"the chief ended with {end.describe()}.")
        if end.code == 0 and self._list_running("evaluator"):
            self._is_trained = True
            for child in (*self._list_running("ps"), *self._list_running("worker")):
                child.ask_to_end()
            return
        self._finish(end.exit_code)

    def _finish(self, code: int) -> None:
        """End the tasks that still run; parameter servers write a last snapshot."""
        self._code = code
        self._processes.ask_to_end()
