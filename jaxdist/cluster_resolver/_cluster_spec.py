"""`ClusterSpec`: the tasks of each job and their addresses."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias, final

from jaxdist._called import called, name_argument, name_call, refuse, refuse_type
from jaxdist._validate import as_integer, check_instance, show
from jaxdist.errors import ArgumentError, ArgumentTypeError, NotFoundError


@dataclasses.dataclass(frozen=True)
class JobDef:
    """A job: its name, and the address of each task by its number.

    Source:
        `tf.train.JobDef`.
    """

    name: str
    tasks: Mapping[int, str]


@dataclasses.dataclass(frozen=True)
class ClusterDef:
    """The jobs of a cluster.

    Source:
        `tf.train.ClusterDef`.
    """

    job: tuple[JobDef, ...]


def read_cluster_def(cluster: Any) -> Mapping[Any, Any] | None:
    """Return a dict from jobs to tasks, from a dict or a `ClusterDef`; None for other types.

    Messages of TensorFlow are read by their fields, so TensorFlow is not imported.
    """
    if isinstance(cluster, Mapping):
        return cluster
    jobs = getattr(cluster, "job", None)
    if isinstance(jobs, (str, bytes, Mapping)) or not hasattr(jobs, "__len__"):
        return None
    listed = list(jobs) if jobs is not None else []
    if not all(hasattr(job, "name") and hasattr(job, "tasks") for job in listed):
        return None
    return {job.name: dict(job.tasks) for job in listed}


Tasks: TypeAlias = Sequence[str] | Mapping[Any, str]


@final
class ClusterSpec:
    """The tasks of each job of a cluster, and their addresses.

    Args:
        cluster: A dict that contains for each job a list of addresses, or a dict from task numbers
            to addresses; another `ClusterSpec`; or a `ClusterDef`, of jaxdist or TensorFlow.

    Raises:
        ArgumentTypeError: `cluster` has another type, or a job or an address is not a string.
        ArgumentError: The number of a task is negative, or a string that is not a number.

    Example:
        >>> from jaxdist.cluster_resolver import ClusterSpec
        >>> spec = ClusterSpec({"worker": ["a:1", "b:1"], "ps": {3: "c:1"}})
        >>> spec.jobs, spec.task_address("worker", 1), spec.task_indices("ps")
        (['worker', 'ps'], 'b:1', [3])
        >>> spec
        ClusterSpec({'ps': {3: 'c:1'}, 'worker': ['a:1', 'b:1']})

    Source:
        `tf.train.ClusterSpec`.
    """

    @called("ClusterSpec")
    def __init__(self, cluster: "ClusterSpec | Mapping[str, Tasks] | ClusterDef") -> None:
        if isinstance(cluster, ClusterSpec):
            self._jobs: dict[str, dict[int, str]] = {j: dict(t) for j, t in cluster._jobs.items()}
            return
        jobs = read_cluster_def(cluster)
        if jobs is None:
            raise refuse_type(
                f"cluster={show(cluster)}.",
                "cluster is a dict from jobs to tasks.",
                "Pass for instance {'worker': ['host0:2222', 'host1:2222']}.",
            )
        for job in jobs:
            remedy = "Pass for instance {'worker': ['host0:2222']}."
            check_instance("cluster, a job,", job, str, "a string", remedy)
        self._jobs = {job: dict(_parse_tasks(job, tasks)) for job, tasks in jobs.items()}

    def as_dict(self) -> dict[str, list[str] | dict[int, str]]:
        """Return a list of addresses per job, or a dict if the task numbers have gaps.

        A job without tasks is an empty dict.

        Example:
            >>> jaxdist.cluster_resolver.ClusterSpec({"worker": {0: "a:1", 2: "b:1"}}).as_dict()
            {'worker': {0: 'a:1', 2: 'b:1'}}
        """
        return {
            job: [tasks[i] for i in range(len(tasks))]
            if tasks and set(tasks) == set(range(len(tasks)))
            else dict(tasks)
            for job, tasks in self._jobs.items()
        }

    def as_cluster_def(self) -> ClusterDef:
        """Return the jobs, sorted by name, as an object with the fields of TensorFlow's message.

        It is not a protocol buffer. `ClusterSpec` accepts it.

        Example:
            >>> spec = jaxdist.cluster_resolver.ClusterSpec({"worker": ["a:1", "b:1"]})
            >>> [job] = spec.as_cluster_def().job
            >>> job.name, job.tasks
            ('worker', {0: 'a:1', 1: 'b:1'})
        """
        return ClusterDef(tuple(JobDef(job, dict(self._jobs[job])) for job in sorted(self._jobs)))

    @property
    def jobs(self) -> list[str]:
        """Names of the jobs, in insertion order."""
        return list(self._jobs)

    def num_tasks(self, job_name: str) -> int:
        """Return the number of tasks of a job.

        Raises:
            NotFoundError: No such job.

        Example:
            >>> jaxdist.cluster_resolver.ClusterSpec({"worker": ["a:1", "b:1"]}).num_tasks("worker")
            2
        """
        return len(self._get_tasks("num_tasks", job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """Return the task numbers of a job, sorted.

        Raises:
            NotFoundError: No such job.

        Example:
            >>> jaxdist.cluster_resolver.ClusterSpec({"ps": {3: "c:1"}}).task_indices("ps")
            [3]
        """
        return sorted(self._get_tasks("task_indices", job_name))

    @called("ClusterSpec.task_address")
    def task_address(self, job_name: str, task_index: int) -> str:
        """Return the address of a task.

        Raises:
            NotFoundError: No such job or task.

        Example:
            >>> spec = jaxdist.cluster_resolver.ClusterSpec({"worker": ["a:1", "b:1"]})
            >>> spec.task_address("worker", 1)
            'b:1'
        """
        tasks = self._get_tasks("task_address", job_name)
        task_index = as_integer("task_index", task_index, remedy=f"Pass one of {sorted(tasks)}.")
        if task_index not in tasks:
            raise refuse(
                f"task_index={task_index}, and job {job_name!r} has no such task.",
                f"Its tasks are {sorted(tasks)}.",
                "Pass one of these.",
                kind=NotFoundError,
            )
        return tasks[task_index]

    @called("ClusterSpec.job_tasks")
    def job_tasks(self, job_name: str) -> list[str | None]:
        """Return the addresses of a job, indexed by task number; None for numbers without a task.

        Raises:
            NotFoundError: No such job, or a job without tasks.

        Example:
            >>> jaxdist.cluster_resolver.ClusterSpec({"ps": {1: "c:1"}}).job_tasks("ps")
            [None, 'c:1']
        """
        tasks = self._get_tasks("job_tasks", job_name)
        if not tasks:
            raise refuse(
                f"job_name={job_name!r}, and this job has no tasks.",
                "It lists the addresses of a job with one task or more.",
                f"Make the cluster with an address: ClusterSpec({{{job_name!r}: ['host0:2222']}}).",
                kind=NotFoundError,
            )
        return [tasks.get(i) for i in range(max(tasks) + 1)]

    @called(lambda method: f"ClusterSpec.{method}")
    def _get_tasks(self, method: str, job_name: str) -> dict[int, str]:
        remedy = f"Pass one of {self.jobs}."
        check_instance("job_name", job_name, str, "the name of a job", remedy)
        if job_name not in self._jobs:
            raise refuse(
                f"job_name={job_name!r}, which is not a job of the cluster.",
                f"Its jobs are {self.jobs}.",
                "Pass one of these.",
                kind=NotFoundError,
            )
        return self._jobs[job_name]

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def __eq__(self, other: object) -> bool:
        # As in TensorFlow, a spec equals the dict from which it was made.
        if isinstance(other, Mapping):
            try:
                other = ClusterSpec(other)
            except (ArgumentError, ArgumentTypeError):
                return False
        return isinstance(other, ClusterSpec) and self._jobs == other._jobs

    # A spec can equal a dict, which is not hashable, so it cannot be hashable either.
    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        jobs = self.as_dict()
        return f"ClusterSpec({{{', '.join(f'{job!r}: {jobs[job]!r}' for job in sorted(jobs))}}})"


@called("ClusterSpec")
def _parse_tasks(job: str, tasks: Any) -> Iterator[tuple[int, str]]:
    if isinstance(tasks, Mapping):
        pairs = [(_parse_index(job, i), address) for i, address in tasks.items()]
    elif isinstance(tasks, (list, tuple)):
        pairs = list(enumerate(tasks))
    else:
        raise refuse_type(
            f"cluster[{job!r}]={show(tasks)}.",
            "The tasks of a job are addresses.",
            "Pass a list of addresses, or a dict from the number of a task to its address.",
        )
    for index, address in sorted(pairs):
        if not isinstance(address, str):
            raise refuse_type(
                f"cluster[{job!r}][{index}]={show(address)}.",
                "The address of a task is a string.",
                "Pass a string such as 'host:2222'.",
            )
        yield index, address


@called("ClusterSpec")
def _parse_index(job: str, index: Any) -> int:
    found = name_argument(f"cluster[{job!r}]")
    given = f"{name_call()} was given {found} with the task {show(index)}.\n\n"
    rest = "Tasks are numbered from 0.\n\nUse integers as keys: {0: 'host:2222'}."
    # JSON, and so `TF_CONFIG`, has only strings as keys.
    if isinstance(index, str):
        if not index.strip().isdecimal():
            raise ArgumentError(given + rest)
        return int(index)
    number = as_integer(f"a task of cluster[{job!r}]", index, remedy=rest)
    if number < 0:
        raise ArgumentError(given + rest)
    return number
