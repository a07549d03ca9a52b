"""Runs `jaxdist launch --ps`: parameter servers, workers and a chief."""

import dataclasses
import functools
import os
import pathlib
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence

from jaxdist._called import called
from jaxdist._launching.child import Child, Write
from jaxdist._launching.cluster.environment import (
    describe_joining,
    make_shared,
    make_task_environment,
)
from jaxdist._launching.cluster.supervisor import Supervisor, Task
from jaxdist._launching.environment import check_devices
from jaxdist._launching.gpus import divide_gpus, list_gpus
from jaxdist._launching.job import MOST_PROCESSES, check_numbers
from jaxdist._launching.output import say, write_to
from jaxdist._launching.ports import find_free_ports
from jaxdist._launching.processes import Patience
from jaxdist._launching.signals import Signals, collect_signals
from jaxdist._validate import as_integer, as_number

_CALLER = "jaxdist launch"


@dataclasses.dataclass(frozen=True)
class ClusterJob:
    """Parameter servers, workers, a chief, and optionally an evaluator.

    Args:
        command: The program of the chief and the evaluator, and its arguments.
        server_command: The program of the other tasks, and its arguments.
        ps: Number of parameter servers.
        workers: Number of workers.
        devices_per_process: Number of GPUs of each worker, or of CPU devices without GPUs.
        restarts: How many times the chief may be started again after a failure.
        snapshot_directory: Where the parameter servers write their snapshots; None for a folder
            that is deleted at the end.
        patience: How long the launcher waits.
        evaluators: Number of evaluators, 0 or 1. The evaluator is not part of the cluster, and
            continues after the chief has ended, until it ends by itself.

    Raises:
        ArgumentError: A number is out of range.
    """

    command: Sequence[str]
    server_command: Sequence[str]
    ps: int
    workers: int
    devices_per_process: int | None = None
    restarts: int = 0
    snapshot_directory: pathlib.Path | None = None
    patience: Patience = dataclasses.field(default_factory=Patience)
    evaluators: int = 0

    @called(_CALLER)
    def __post_init__(self) -> None:
        for name in ("ps", "workers"):
            count = getattr(self, name)
            as_integer(f"--{name}", count, least=1, most=MOST_PROCESSES, example=2)
        check_numbers(self.devices_per_process, self.restarts)
        as_integer("--evaluator", self.evaluators, least=0, most=1)
        as_number("grace_seconds", self.patience.grace, least=0)

    @property
    def counts(self) -> dict[str, int]:
        """The number of tasks of each job."""
        counts = {"ps": self.ps, "worker": self.workers, "chief": 1}
        return {**counts, "evaluator": self.evaluators} if self.evaluators else counts

    def find_command(self, name: str) -> Sequence[str]:
        """Return the command of the tasks of a job."""
        return self.command if name in ("chief", "evaluator") else self.server_command


Run = Callable[[ClusterJob, tuple[Write, Write], Signals], int]


def launch_cluster(job: ClusterJob, run: Run | None = None) -> int:
    """Run a job, and return the exit code of the launcher: that of the chief.

    A parameter server or a worker that is killed starts again, while the others continue. When the
    chief ends, the launcher ends the other tasks.

    Args:
        job: The job.
        run: Runs the tasks; None for `run_tasks`, on this machine.

    Cost:
        The processes of the job. The launcher itself uses no device of JAX.

    Raises:
        LaunchError: The processes cannot be started.
    """
    write = (write_to(sys.stdout), write_to(sys.stderr))
    with collect_signals() as signals:
        return (run or run_tasks)(job, write, signals)


@called(_CALLER)
def run_tasks(job: ClusterJob, write: tuple[Write, Write], signals: Signals) -> int:
    """Run the tasks on this machine, and return the exit code."""
    ports = iter(find_free_ports(sum(job.counts.values()) + 1))
    cluster = {
        name: [f"127.0.0.1:{next(ports)}" for _ in range(count)]
        for name, count in job.counts.items()
        if name != "evaluator"
    }
    if how := describe_joining(os.environ, cluster, f"127.0.0.1:{next(ports)}"):
        say(f"{how} {shlex.join(job.server_command)}")
    check_devices(job.devices_per_process, os.environ)
    devices = job.devices_per_process or 1
    gpus = divide_gpus(job.workers, devices, os.environ, list_gpus)
    with tempfile.TemporaryDirectory(prefix="jaxdist-") as folder:
        shared = make_shared(os.environ, job.snapshot_directory or pathlib.Path(folder, "ps"))
        tasks = []
        for name, count in job.counts.items():
            for index in range(count):
                own = pathlib.Path(folder, f"{name}_{index}")
                own.mkdir()
                environment = make_task_environment(
                    shared, cluster, name, index, None if gpus is not None else devices
                )
                if gpus is not None and name == "worker":
                    environment["CUDA_VISIBLE_DEVICES"] = gpus[index]
                command = job.find_command(name)
                start = functools.partial(_start, name, index, command, environment, write, own)
                tasks.append(Task(name, index, start, own))
        return Supervisor(tasks, signals, job.patience, job.restarts).run()


def _start(
    name: str,
    index: int,
    command: Sequence[str],
    environment: dict[str, str],
    write: tuple[Write, Write],
    folder: pathlib.Path,
    starts: int,
) -> Child:
    own = {**environment, "JAXDIST_ATTEMPT": str(starts)}
    return Child(index, command, own, write, folder, f"{name} {index}")
