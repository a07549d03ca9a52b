"""`RayTask`: one start of a task of a cluster, in an actor that Ray restarts."""

import contextlib
import dataclasses
import functools
import os
import pathlib
import secrets
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from signal import SIGKILL, SIGTERM
from typing import Any

from jaxdist._called import called, refuse
from jaxdist._launching.child import End, Write
from jaxdist._launching.cluster import ClusterJob
from jaxdist._launching.cluster.environment import make_shared, make_task_environment
from jaxdist._launching.cluster.supervisor import Supervisor, Task
from jaxdist._launching.on_ray.child import RayChild
from jaxdist._launching.on_ray.placement import (
    SECONDS_UNTIL_NEWS,
    Places,
    make_bundle,
    start_actors,
)
from jaxdist._launching.output import say
from jaxdist._launching.signals import Signals
from jaxdist._processes import get_settings
from jaxdist.errors import LaunchError

_NAP = 0.2


@dataclasses.dataclass(frozen=True)
class OnRay:
    """A task of a cluster on Ray: the values that all its starts share.

    Args:
        name: The task, such as `ps 0`.
        index: Its number in its job.
        actor_name: Name of its actor in Ray.
        arguments: The arguments after `python`.
        environment: The environment of the process.
        has_gpus: Whether Ray has chosen GPUs for it.
        only_host: The one host on which it may run; None for any.
    """

    name: str
    index: int
    actor_name: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    has_gpus: bool
    only_host: str | None = None


class RayTask(RayChild):
    """One start of a task: a process of its actor, which Ray may first have to restart.

    Args:
        ray: The module.
        task: The task.
        starts: The number of its starts, including this one.
        actor: Its actor.
        places: Where all tasks are.
        write: Two functions that take lines: of its standard output, and of its standard error.
    """

    def __init__(
        self,
        ray: Any,
        task: OnRay,
        starts: int,
        actor: Any,
        places: Places,
        write: tuple[Write, Write],
    ) -> None:
        self._ray, self._task, self._starts, self._places = ray, task, starts, places
        # An actor can neither signal nor kill a process that does not exist yet.
        self._is_asked = threading.Event()
        super().__init__(task.index, actor, ray.get, write)

    def signal(self, number: int, *, to_group: bool = False) -> None:
        """Send a signal to the process; a process that has not started will not start."""
        self._is_asked.set()
        super().signal(number, to_group=to_group)

    def ask_to_end(self) -> None:
        """Ask the process to end because of another one; it may clean up."""
        self._is_asked.set()
        super().ask_to_end()

    def kill(self) -> None:
        """End the process and its group at once."""
        self._is_asked.set()
        super().kill()

    def _prepare(self) -> End | None:
        if self._starts > 1:
            self._wait_for_actor()
        if self._is_asked.is_set():
            return End(self.index, -SIGTERM, was_ended=True)
        task = self._task
        environment = {**task.environment, "JAXDIST_ATTEMPT": str(self._starts)}
        started = self._actor.start.remote(
            task.index,
            list(task.arguments),
            environment,
            os.getcwd(),
            has_gpus=task.has_gpus,
            name=task.name,
            addresses=self._places.describe(),
        )
        self._get(started)
        if self._was_ended:
            # The request to end came before the process existed.
            self._actor.kill.remote()
        return None

    def _wait_for_actor(self) -> None:
        """Wait until Ray has restarted the actor, and send its address to all tasks."""
        errors = self._ray.exceptions
        began, has_said, answer = time.monotonic(), False, None
        while not self._is_asked.is_set():
            waited = time.monotonic() - began
            if waited > get_settings().join_seconds:
                raise LaunchError(
                    f"Ray has not started {self._task.name} again within {waited:.0f} s.\n\n"
                    "It needs as many CPUs and GPUs as before.\n\n"
                    "`ray status` shows what is missing. JAXDIST_JOIN_SECONDS sets how long to "
                    "wait."
                )
            if waited > SECONDS_UNTIL_NEWS and not has_said:
                has_said = True
                say(f"waiting until Ray has started {self._task.name} again.")
            try:
                if answer is None:
                    self._actor = self._ray.get_actor(self._task.actor_name)
                    answer = self._actor.find_address.remote(
                        self._places.find(self._task.name), self._places.list_taken()
                    )
                if self._ray.wait([answer], timeout=_NAP)[0]:
                    self._use(self._get(answer))
                    return
            except errors.ActorUnavailableError:
                answer = None
                self._is_asked.wait(_NAP)

    def _use(self, address: str) -> None:
        only = self._task.only_host
        if only is not None and address.rpartition(":")[0] != only:
            raise make_snapshot_error(self._task.name, address, only)
        self._places.move(self._task.name, address)

    def _describe_loss(self, error: Exception) -> End:
        if isinstance(error, self._ray.exceptions.RayActorError):
            # The process ends with its actor.
            how = "the end of its Ray actor"
            return End(self.index, -SIGKILL, was_ended=self._was_ended, lost_with=how)
        if not self._was_ended:
            self._news.append((b"", f"[{self._task.name}] {error}\n".encode()))
        return End(self.index, 1, was_ended=self._was_ended)


@called("jaxdist launch --on ray")
def make_snapshot_error(name: str, address: str, host: str) -> LaunchError:
    """Return the error for a parameter server that cannot read its snapshots."""
    return refuse(
        f"no --snapshot-directory, and {name} is at {address}, on another node than the launcher ("
        f"{host}).",
        "A parameter server that Ray starts again, perhaps on a third node, begins with its "
        "snapshot, so all nodes read one folder.",
        "Pass --snapshot-directory with a folder that all nodes share.",
        kind=LaunchError,
    )


_FOR_EVER = -1


def run_tasks_on_ray(
    ray: Any, job: ClusterJob, gpus: int, write: tuple[Write, Write], signals: Signals
) -> int:
    """Run the tasks of a job, and return the exit code of the launcher.

    Ray restarts an actor whose process or node is lost: always for parameter servers and workers,
    up to `--restarts` times for the chief. The launcher then starts its task again.

    Args:
        ray: The module.
        job: The job.
        gpus: Number of GPUs of each worker; 0 for CPU devices.
        write: Two functions that take lines: of standard output, and of standard error.
        signals: Signals to the launcher.

    Raises:
        LaunchError: The CPUs or GPUs do not become free in time, a node lacks jaxdist, or a
            parameter server could not read its snapshots on another node.
    """
    roles = [(job_name, n) for job_name, count in job.counts.items() for n in range(count)]
    bundles = [make_bundle(gpus if job_name == "worker" else 0) for job_name, _ in roles]
    run = secrets.token_hex(4)
    actor_names = [f"jaxdist-{run}-{job_name}-{index}" for job_name, index in roles]
    with contextlib.ExitStack() as stack:
        options = [
            {"name": name, "max_restarts": job.restarts if role == "chief" else _FOR_EVER}
            for name, (role, _) in zip(actor_names, roles, strict=True)
        ]
        started = start_actors(ray, bundles, signals, stack, options)
        if started is None:
            return Supervisor([], signals, job.patience, job.restarts).run()
        actors, found = started
        cluster: dict[str, list[str]] = {job_name: [] for job_name in job.counts}
        for (job_name, _), address in zip(roles, found, strict=True):
            cluster[job_name].append(address)
        names = [f"{job_name} {index}" for job_name, index in roles]
        places = Places(dict(zip(names, found, strict=True)), actors)
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="jaxdist-")))
        only_host = None
        if job.snapshot_directory is None:
            host = str(ray.util.get_node_ip_address())
            only_host = f"[{host}]" if ":" in host else host
            for index, address in enumerate(cluster["ps"]):
                if address.rpartition(":")[0] != only_host:
                    raise make_snapshot_error(f"ps {index}", address, only_host)
        shared = make_shared(os.environ, job.snapshot_directory or folder)
        devices = None if gpus else job.devices_per_process or 1
        tasks = []
        for number, (job_name, index) in enumerate(roles):
            task = OnRay(
                names[number],
                index,
                actor_names[number],
                job.find_command(job_name)[1:],
                make_task_environment(shared, cluster, job_name, index, devices),
                has_gpus=bool(gpus) and job_name == "worker",
                only_host=only_host if job_name == "ps" else None,
            )
            start = functools.partial(_start, ray, task, actors[number], places, write)
            tasks.append(Task(job_name, index, start, folder))
        return Supervisor(tasks, signals, job.patience, job.restarts).run()


def _start(
    ray: Any, task: OnRay, actor: Any, places: Places, write: tuple[Write, Write], starts: int
) -> RayTask:
    return RayTask(ray, task, starts, actor, places, write)
