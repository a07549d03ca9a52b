"""`SlurmClusterResolver`: resolves the tasks of a Slurm step."""

import os
import shutil
import subprocess
from collections.abc import Mapping, MutableMapping
from typing import Any, final

from jaxdist._called import called, refuse
from jaxdist._gpu_settings import list_visible_gpus
from jaxdist._validate import as_flag, as_integer, check_instance
from jaxdist.cluster_resolver._cluster_spec import ClusterSpec
from jaxdist.cluster_resolver._resolver import (
    ListingResolver,
    check_task,
    log_unused_arguments,
)
from jaxdist.cluster_resolver._slurm.step import count_tasks, read_step
from jaxdist.errors import ClusterError

_CALLER = "SlurmClusterResolver"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
# Limit for tasks and GPUs of one host: no host has more ports.
_MOST = 65535


@final
class SlurmClusterResolver(ListingResolver):
    """A resolver for the processes that one `srun` of the Slurm workload manager starts.

    The jobs, sorted by name, get the tasks of the step in the order of `SLURM_PROCID`. Hosts are in
    the order in which Slurm distributes tasks to them. TensorFlow sorts them as strings, so that
    task 0 can have another address than process 0. `task_type` and `task_id` are None until
    `cluster_spec` is called for the first time.

    Args:
        jobs: Number of tasks of each job; by default all tasks are `worker`.
        port_base: The port of the first task of a host; the next tasks use the next ports.
        gpus_per_node: Number of GPUs of each host; by default those in `CUDA_VISIBLE_DEVICES`, else
            those that nvidia-smi lists, else 0.
        gpus_per_task: Number of GPUs of each task; by default `SLURM_GPUS_PER_TASK`, else an equal
            share of those of a host.
        tasks_per_node: Number of tasks of each host, or a dict from hosts to numbers; by default
            from Slurm's variables.
        auto_set_gpu: Whether `cluster_spec` sets `CUDA_VISIBLE_DEVICES` to the GPUs of this task.
            The variable stays as it is on hosts without GPUs, and where Slurm has given each task
            its own GPUs.
        rpc_layer: The protocol prefix of addresses.
        environ: The environment variables to read and set, instead of those of this process.

    Raises:
        ClusterError: Slurm's variables are missing or contradict each other, the jobs do not have
            as many tasks as the step, or the tasks need more GPUs than a host has.

    Example:
        >>> environ = {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "3",
        ...     "SLURM_STEP_NODELIST": "node[09-10]", "SLURM_STEP_TASKS_PER_NODE": "2,1"}
        >>> resolver = jaxdist.cluster_resolver.SlurmClusterResolver(
        ...     {"chief": 1, "worker": 2}, gpus_per_node=0, environ=environ)
        >>> resolver.cluster_spec()
        ClusterSpec({'chief': ['node09:8888'], 'worker': ['node09:8889', 'node10:8888']})
        >>> resolver.get_task_info()
        ('worker', 1)

    Source:
        `tf.distribute.cluster_resolver.SlurmClusterResolver`.
    """

    @called(_CALLER)
    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        port_base: int = 8888,
        gpus_per_node: int | None = None,
        gpus_per_task: int | None = None,
        tasks_per_node: int | Mapping[str, int] | None = None,
        auto_set_gpu: bool = True,
        rpc_layer: str | None = "grpc",
        *,
        environ: MutableMapping[str, str] | None = None,
    ) -> None:
        if environ is not None:
            remedy = "Leave environ out: then it is the environment of this process."
            what = "a dict from strings to strings"
            check_instance("environ", environ, MutableMapping, what, remedy)
        self._environ = os.environ if environ is None else environ
        if jobs is not None:
            _check_numbers("jobs", jobs, least=0)
        if isinstance(tasks_per_node, Mapping):
            _check_numbers("tasks_per_node", tasks_per_node, least=1)
        elif tasks_per_node is not None:
            as_integer("tasks_per_node", tasks_per_node, least=1, most=_MOST)
        self._port_base = as_integer("port_base", port_base, least=1, most=65535, example=8888)
        for name, number in (("gpus_per_node", gpus_per_node), ("gpus_per_task", gpus_per_task)):
            if number is not None:
                as_integer(name, number, least=0, most=_MOST)
        self._auto_set_gpu = as_flag("auto_set_gpu", auto_set_gpu)
        check_task(None, None, rpc_layer)
        self.rpc_layer = rpc_layer
        self._step = read_step(self._environ, tasks_per_node)
        self._jobs = {"worker": count_tasks(self._environ)} if jobs is None else dict(jobs)
        self._check_tasks()
        self._divide_gpus(gpus_per_node, gpus_per_task)

    def cluster_spec(self) -> ClusterSpec:
        """Return the tasks of the step; set `task_type`, `task_id` and the GPUs of this process.

        The GPUs are set in `CUDA_VISIBLE_DEVICES`, before JAX reads it, unless `auto_set_gpu` is
        False.
        """
        addresses = [f"{host}:{self._port_base + local}" for host, local in self._step.places]
        cluster: dict[str, list[str]] = {}
        start, rank = 0, self._step.rank
        for job, count in sorted(self._jobs.items()):
            cluster[job] = addresses[start : start + count]
            if start <= rank < start + count:
                self.task_type, self.task_id = job, rank - start
            start += count
        if self._auto_set_gpu and self._gpus:
            first = self._step.places[rank][1] * self._gpus_per_task
            self._environ[_VISIBLE] = ",".join(self._gpus[first : first + self._gpus_per_task])
        return ClusterSpec(cluster)

    def get_task_info(self) -> tuple[str | None, int | None]:
        """Return the job and the number of this process; None before `cluster_spec` is called."""
        return self.task_type, self.task_id

    @called(f"{_CALLER}.num_accelerators")
    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: Any = None,
    ) -> dict[str, int]:
        """Return the number of GPUs of a task."""
        check_task(task_type, task_id)
        log_unused_arguments(config_proto, task_type, task_id)
        return {"GPU": self._gpus_per_task}

    def _describe_source(self) -> str:
        return f"SLURM_PROCID={self._step.rank}"

    def _check_tasks(self) -> None:
        asked, count = sum(self._jobs.values()), len(self._step.places)
        if asked != count:
            raise refuse(
                f"jobs={self._jobs!r}, which are {asked} tasks, and Slurm has started {count}.",
                "Each task of the step is a task of one job.",
                f"Pass jobs with {count} tasks, for instance jobs={{'worker': {count}}}, or start "
                f"`srun --ntasks={asked}`.",
                kind=ClusterError,
            )
        last = self._port_base + self._step.most_on_one_host - 1
        if last > 65535:
            raise refuse(
                f"port_base={self._port_base}, and the last task of a host would have the port "
                f"{last}.",
                "Ports end at 65535.",
                f"Pass port_base={65536 - self._step.most_on_one_host} or less.",
                kind=ClusterError,
            )

    def _divide_gpus(self, per_node: int | None, per_task: int | None) -> None:
        tasks = self._step.most_on_one_host
        bound = self._environ.get("SLURM_GPUS_PER_TASK", "").rpartition(":")[2]
        self._gpus: list[str] = []
        if per_node is None and per_task is None and bound.isdecimal():
            # Slurm gives each task its GPUs. But if the job requests a kind of GPU, all tasks of a
            # host see all its GPUs in Slurm 22.05.
            self._gpus_per_task = int(bound)
            seen = _VISIBLE in self._environ
            listed: list[str] = [] if seen else list_gpus(self._environ)
            if tasks > 1 and len(listed) >= tasks * self._gpus_per_task:
                self._gpus = listed
            return
        visible = list_gpus(self._environ) if per_node is None else None
        count = len(visible) if visible is not None else per_node or 0
        self._gpus_per_task = count // tasks if per_task is None else per_task
        needed = tasks * self._gpus_per_task
        if needed > count:
            raise refuse(
                f"gpus_per_task={self._gpus_per_task}, so {tasks} tasks of a host need {needed} "
                f"GPUs, and it has {count}.",
                "A GPU belongs to one task.",
                f"Pass gpus_per_task={count // tasks} or less.",
                kind=ClusterError,
            )
        # A shared host shows only the GPUs of this job, whose numbers need not begin at 0.
        if visible is None and _VISIBLE in self._environ:
            listed = list_gpus(self._environ)
            visible = listed if len(listed) >= needed else None
        if self._gpus_per_task:
            self._gpus = visible or [str(i) for i in range(count)]


def _check_numbers(name: str, numbers: Any, least: int) -> None:
    example = {"jobs": "{'worker': 4}", "tasks_per_node": "{'node1': 2, 'node2': 2}"}[name]
    what = "a dict from strings to numbers of tasks, with one entry or more"
    remedy = f"Pass for instance {name}={example}."
    is_full = isinstance(numbers, Mapping) and numbers
    check_instance(name, numbers if is_full else None, Mapping, what, remedy)
    for key, number in numbers.items():
        check_instance(name, key, str, what, remedy)
        as_integer(f"{name}[{key!r}]", number, least=least, most=_MOST**2, remedy=remedy)


def list_gpus(environ: Mapping[str, str]) -> list[str]:
    """Return the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them.

    Cost:
        Without that variable, one call of nvidia-smi, if it is installed.

    Raises:
        ClusterError: nvidia-smi fails.
    """
    visible = list_visible_gpus(environ)
    if visible is not None:
        return visible
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    shown = subprocess.run([command, "--list-gpus"], capture_output=True, text=True, check=False)
    if shown.returncode:
        said = " ".join((shown.stdout + shown.stderr).split())[:200]
        raise ClusterError(
            f"SlurmClusterResolver called nvidia-smi, which ended with code {shown.returncode}: "
            f"{said}\n\nWithout CUDA_VISIBLE_DEVICES, it counts the GPUs of a host (gpus_per_node)."
            "\n\nPass gpus_per_node, for instance gpus_per_node=0 on hosts without GPUs."
        )
    return [
        str(i)
        for i, line in enumerate(
            line for line in shown.stdout.splitlines() if line.startswith("GPU ")
        )
    ]
