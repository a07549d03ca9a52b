"""`run_tasks_on_ray`: runs parameter servers, workers and a chief as actors."""

import contextlib
import functools
import os
import pathlib
import secrets
import tempfile
from typing import Any

from jaxdist._launching.child import Write
from jaxdist._launching.cluster import ClusterJob
from jaxdist._launching.cluster.environment import make_shared, make_task_environment
from jaxdist._launching.cluster.supervisor import Supervisor, Task
from jaxdist._launching.on_ray.placement import find_addresses, make_bundle, reserve, start_actor
from jaxdist._launching.on_ray.places import Places
from jaxdist._launching.on_ray.task import OnRay, RayTask, make_snapshot_error
from jaxdist._launching.signals import Signals

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
        group = reserve(ray, bundles, signals, stack)
        if group is None:
            return Supervisor([], signals, job.patience, job.restarts).run()
        actors = [
            start_actor(
                ray,
                group,
                number,
                bundle,
                stack,
                name=actor_names[number],
                max_restarts=job.restarts if roles[number][0] == "chief" else _FOR_EVER,
            )
            for number, bundle in enumerate(bundles)
        ]
        found = find_addresses(ray, actors)
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
