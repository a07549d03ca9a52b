"""Starts a job of processes on this machine, and restarts it."""

import contextlib
import dataclasses
import math
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

from jaxdist import _compat
from jaxdist._called import called
from jaxdist._launching.child import Child, End, Write, name_signal, write_end
from jaxdist._launching.environment import make_environments
from jaxdist._launching.first_cause import Cause, find_first_cause, find_lost
from jaxdist._launching.output import say, write_to
from jaxdist._launching.ports import find_free_ports
from jaxdist._launching.processes import AnyChild, Patience, Processes
from jaxdist._launching.signals import Signals, collect_signals
from jaxdist._processes import get_settings
from jaxdist._validate import as_integer, as_number

# A larger number on one machine counts as a mistake.
MOST_PROCESSES = 512
MOST_DEVICES = 4096


def check_numbers(devices: int | None, restarts: int) -> None:
    """Check the numbers that every job has."""
    if devices is not None:
        as_integer("devices_per_process", devices, least=1, most=MOST_DEVICES, example=1)
    as_integer("restarts", restarts, least=0)


@dataclasses.dataclass(frozen=True)
class Job:
    """A command that runs in several processes of this machine.

    Args:
        command: The program and its arguments; the same in each process.
        count: Number of processes.
        devices_per_process: Number of GPUs of each process, or of CPU devices without GPUs; None
            for one.
        restarts: How many times all processes start again after one has failed.
        patience: How long the launcher waits.
        least: The fewest processes with which the job continues when others are lost; None if it
            needs all.
        caller: What the user called, for errors.

    Raises:
        ArgumentError: A number is out of range.
    """

    command: Sequence[str]
    count: int
    devices_per_process: int | None = None
    restarts: int = 0
    patience: Patience = dataclasses.field(default_factory=Patience)
    least: int | None = None
    caller: str = "jaxdist launch"

    @called(lambda self: self.caller)
    def __post_init__(self) -> None:
        name = "-n" if self.caller == "jaxdist launch" else "n"
        if self.least is not None:
            name = "the second number of --elastic"
        as_integer(name, self.count, least=1, most=MOST_PROCESSES, example=2)
        if self.least is not None:
            first = "the first number of --elastic"
            as_integer(first, self.least, least=1, most=self.count, example=1)
        check_numbers(self.devices_per_process, self.restarts)
        for part in ("report", "grace"):
            as_number(f"{part}_seconds", getattr(self.patience, part), least=0)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How an attempt ended.

    Attributes:
        ends: How each process ended, the earliest first.
        cause: The first cause; None if all ended with code 0.
        signal: The first signal to the launcher; None without one.
        late: Processes that were still running when the time of the job was over.
        lost: The processes that made the job fail.
    """

    ends: tuple[End, ...]
    cause: Cause | None
    signal: int | None
    late: tuple[int, ...]
    lost: tuple[int, ...] = ()


Run = Callable[..., Outcome]


def launch(job: Job, run: Run | None = None) -> int:
    """Run a job, restart it as often as allowed, and return the exit code of the launcher.

    Args:
        job: The job.
        run: Runs the processes once; None for `run_attempt`, on this machine.

    Cost:
        The processes of the job. The launcher itself uses no device of JAX.

    Raises:
        LaunchError: The processes cannot be started.
    """
    write = (write_to(sys.stdout), write_to(sys.stderr))
    everybody = tuple(range(job.count))
    places, restarts, attempt = everybody, 0, 1
    with collect_signals() as signals:
        while True:
            outcome = (run or run_attempt)(job, write, signals, attempt, places)
            if outcome.signal is not None:
                say(f"ended by {name_signal(outcome.signal)}; no process is left.")
                return 128 + outcome.signal
            if outcome.cause is None:
                return 0
            left = [place for n, place in enumerate(places) if n not in outcome.lost]
            goes_on = job.least is not None and len(left) >= job.least
            if job.least is not None and not goes_on:
                say(
                    f"The job needs at least {_count(job.least)}, and {len(left) or 'none'} of "
                    f"{len(places)} {'is' if len(left) < 2 else 'are'} left."
                )
            _report(outcome, outcome.cause)
            if goes_on:
                _report_loss(len(places), outcome.lost, len(left))
                places = tuple(left)
            elif restarts == job.restarts:
                return outcome.cause.exit_code
            else:
                restarts += 1
                places = everybody
                say(
                    f"attempt {attempt} failed because of process {outcome.cause.index}. "
                    f"Restart {restarts} of {job.restarts}: all start again ({_count(job.count)})."
                )
            attempt += 1


@called(lambda job: job.caller)
def run_attempt(
    job: Job,
    write: tuple[Write, Write],
    signals: Signals,
    attempt: int = 1,
    places: Sequence[int] | None = None,
) -> Outcome:
    """Run the processes of a job once: those in `places`, or all."""
    places = range(job.count) if places is None else places
    count = len(places)
    # New ports each time: a late process could otherwise connect to those of another attempt.
    port, *ports = find_free_ports(count + 1)
    service = f"127.0.0.1:{port}"
    environments = make_environments(places, job.devices_per_process, ports, service, attempt)

    def start(index: int, folder: pathlib.Path) -> Child:
        return Child(index, job.command, environments[index], write, folder)

    return run_together(job, count, service, start, signals)


def run_together(
    job: Job,
    count: int,
    service: str,
    start: Callable[[int, pathlib.Path], AnyChild],
    signals: Signals,
) -> Outcome:
    """Host the coordination service, and run processes that end together when one fails.

    Args:
        job: The job.
        count: Number of processes.
        service: Address of the service.
        start: Starts the process with a given number; takes also the folder in which the launcher
            writes how each process ended.
        signals: Signals to the launcher.
    """
    seconds = math.ceil(get_settings().heartbeat_seconds)
    ends: list[End] = []
    late: tuple[int, ...] = ()
    has_failed = False
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="jaxdist-")))
        hosted = _compat.host_coordination_service(
            service, count, heartbeat_seconds=seconds, shutdown_seconds=seconds
        )
        stack.callback(hosted.shutdown)
        processes = stack.enter_context(Processes(signals, job.patience.grace))
        for index in range(count):
            processes.add(start(index, folder))
        over = math.inf if job.patience.job is None else time.monotonic() + job.patience.job
        while processes.running:
            for _, end in processes.wait(over):
                ends.append(end)
                if end.was_ended:
                    continue
                write_end(folder, end)
                for other in processes.running:
                    other.hear(end)
                # After a signal, each process may take the time that it needs, for instance to
                # save.
                if end.code != 0 and not signals.forwarded and not has_failed:
                    has_failed = True
                    processes.ask_at = time.monotonic() + job.patience.report
            if time.monotonic() > over:
                # Once: the processes that are killed may still take a while to end.
                over = math.inf
                late = tuple(child.index for child in processes.running)
                processes.kill()
    first = signals.received[0] if signals.received else None
    return Outcome(tuple(ends), find_first_cause(ends), first, late, find_lost(ends))


def _report_loss(before: int, lost: Sequence[int], left: int) -> None:
    numbers = ", ".join(map(str, lost))
    were = f"process {numbers} was" if len(lost) == 1 else f"processes {numbers} were"
    say(
        f"{were} lost. The job continues with {left} of {before}: {_count(left)} "
        f"{'starts' if left == 1 else 'start'} again, with new numbers."
    )


def _count(processes: int) -> str:
    return "1 process" if processes == 1 else f"{processes} processes"


def _report(outcome: Outcome, cause: Cause) -> None:
    """Print how the other processes ended, then the first cause."""
    others = [
        f"{end.index} ({'ended by jaxdist launch' if end.was_ended else end.describe()})"
        for end in sorted(outcome.ends, key=lambda end: end.index)
        if end.index != cause.index and end.code != 0
    ]
    if others:
        say(f"other processes that failed or were ended: {', '.join(others)}.")
    say(cause.text)
