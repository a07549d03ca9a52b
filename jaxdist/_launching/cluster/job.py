"""`jaxdist launch --ps`: parameter servers, workers and a chief on this machine."""

import dataclasses
import json
import os
import pathlib
import secrets
import sys
import tempfile
from collections.abc import Mapping, Sequence

from jaxdist._launching.attempt import Patience
from jaxdist._launching.cluster.supervisor import Supervisor, Task
from jaxdist._launching.environment import FORCED, check_devices
from jaxdist._launching.gpus import divide_gpus, list_gpus
from jaxdist._launching.job import MOST_DEVICES, MOST_PROCESSES
from jaxdist._launching.output import write_to
from jaxdist._launching.ports import find_free_ports
from jaxdist._launching.signals import collect_signals
from jaxdist._validate import as_integer, as_number

_CALLER = "jaxdist launch"
# What tells a process of another kind of job who it is.
_NOT_INHERITED = ("JAXDIST_CLUSTER", "JAXDIST_SERVICE")


@dataclasses.dataclass(frozen=True)
class ClusterJob:
    """Parameter servers, workers and a chief.

    Args:
        command: What the chief runs: a program and its arguments.
        server_command: What the others run.
        ps: Number of parameter servers.
        workers: Number of workers.
        devices_per_process: GPUs of each worker where there are GPUs, else CPU devices.
        restarts: How many times the chief is started again after it has failed.
        snapshot_directory: Where the parameter servers write their snapshots; None for a folder
            that is deleted at the end.
        patience: How long the launcher waits.

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

    def __post_init__(self) -> None:
        for name in ("ps", "workers"):
            count = getattr(self, name)
            as_integer(_CALLER, f"--{name}", count, least=1, most=MOST_PROCESSES, example=2)
        if self.devices_per_process is not None:
            as_integer(
                _CALLER,
                "devices_per_process",
                self.devices_per_process,
                least=1,
                most=MOST_DEVICES,
                example=1,
            )
        as_integer(_CALLER, "restarts", self.restarts, least=0)
        as_number(_CALLER, "grace_seconds", self.patience.grace, least=0)


def launch_cluster(job: ClusterJob) -> int:
    """Run a job, and return the exit code of the launcher: that of the chief.

    A parameter server or a worker that is killed is started again, and the others go on. When the
    chief ends, the others are ended.

    Args:
        job: What runs.

    Cost:
        The processes of the job. The launcher uses no device of JAX.

    Raises:
        LaunchError: The processes cannot be started.
    """
    counts = {"ps": job.ps, "worker": job.workers, "chief": 1}
    ports = iter(find_free_ports(sum(counts.values())))
    cluster = {name: [f"127.0.0.1:{next(ports)}" for _ in range(n)] for name, n in counts.items()}
    check_devices(_CALLER, job.devices_per_process, os.environ)
    devices = job.devices_per_process or 1
    gpus = divide_gpus(_CALLER, job.workers, devices, os.environ, list_gpus)
    write = (write_to(sys.stdout), write_to(sys.stderr))
    with tempfile.TemporaryDirectory(prefix="jaxdist-") as folder:
        shared = _make_shared(os.environ, job.snapshot_directory or pathlib.Path(folder, "ps"))
        tasks = []
        for name, count in counts.items():
            for index in range(count):
                own = pathlib.Path(folder, f"{name}_{index}")
                own.mkdir()
                role = {"type": name, "index": index}
                environment = {
                    **shared,
                    "TF_CONFIG": json.dumps({"cluster": cluster, "task": role}),
                    "JAXDIST_LAUNCHER": str(own),
                }
                if gpus is None:
                    environment |= _make_cpu_variables(devices if name == "worker" else 1)
                elif name == "worker":
                    environment["CUDA_VISIBLE_DEVICES"] = gpus[index]
                else:
                    # The memory of the GPUs belongs to the workers.
                    environment["JAX_PLATFORMS"] = "cpu"
                command = job.command if name == "chief" else job.server_command
                tasks.append(Task(name, index, command, environment, own))
        with collect_signals() as signals:
            return Supervisor(tasks, write, signals, job.patience, job.restarts).run()


def _make_shared(inherited: Mapping[str, str], snapshots: pathlib.Path) -> dict[str, str]:
    """Return the environment that all tasks have in common."""
    shared = {name: value for name, value in inherited.items() if name not in _NOT_INHERITED}
    if not (shared.get("JAXDIST_SECRET") or shared.get("JAXDIST_SECRET_FILE")):
        # Other users of this machine reach the ports, too.
        shared["JAXDIST_SECRET"] = secrets.token_urlsafe()
    shared["JAXDIST_SNAPSHOT_DIRECTORY"] = str(snapshots)
    shared.setdefault("PYTHONUNBUFFERED", "1")
    return shared


def _make_cpu_variables(devices: int) -> dict[str, str]:
    if FORCED in os.environ.get("XLA_FLAGS", ""):
        return {}
    return {"JAXDIST_DEVICES_PER_PROCESS": str(devices), "JAX_NUM_CPU_DEVICES": str(devices)}
