"""`Task`: which task of which cluster this process is."""

import dataclasses
from collections.abc import Mapping

from jaxdist import cluster_resolver

# Note [Who this process is]
# All code that works with a cluster reads it here, and each caller checks what it needs:
#
# - Strategies of equal workers (`find_task`): chief, worker, ps, evaluator, at most one chief. The
#   evaluator need not be listed. A task that the resolver does not name is the only one.
# - The coordinator of parameter servers: at least one ps and one worker, at most one chief. It does
#   not need to be listed: a task without a name is the coordinator.
# - Workers of version 1: at least one ps, at most one chief and one evaluator. All are named.
# - Estimator: exactly one chief, or `master`; with a strategy also none. All are named; the number
#   of the evaluator is any.
# - Preemption: only how many train together.


@dataclasses.dataclass(frozen=True)
class Task:
    """This process in its cluster. Tasks of a job may be numbered with gaps.

    Args:
        cluster: The tasks of each job, and their addresses.
        job: The job of this process; None if it is unknown.
        index: Its number in the job; None if it is unknown.
        training: The addresses of the tasks that train together, in the order of their processes:
            the chief, then the workers.
        is_local: Whether all tasks are in this process.
    """

    cluster: "cluster_resolver.ClusterSpec"
    job: str | None
    index: int | None
    training: Mapping[tuple[str, int], str]
    is_local: bool

    @property
    def number(self) -> int | None:
        """The number of this process among those that train together; None if it is not one."""
        numbers = (n for n, own in enumerate(self.training) if own == (self.job, self.index))
        return next(numbers, None)

    @property
    def is_chief(self) -> bool:
        """Whether it is the first that trains: the chief, or the first worker."""
        return self.number == 0

    @property
    def is_alone(self) -> bool:
        """Whether it trains without other processes: a job of one process, a ps or an evaluator."""
        return self.number is None or len(self.training) < 2

    @property
    def is_listed(self) -> bool:
        """Whether the cluster has this task."""
        return self.job in self.counts and self.index in self.cluster.task_indices(self.job)

    @property
    def counts(self) -> dict[str, int]:
        """The number of tasks of each job."""
        return {job: self.cluster.num_tasks(job) for job in self.cluster.jobs}

    @property
    def servers(self) -> list[str]:
        """The addresses of the parameter servers."""
        return self._list_addresses("ps")

    @property
    def workers(self) -> list[str]:
        """The addresses of the workers, without the chief."""
        return self._list_addresses("worker")

    def _list_addresses(self, job: str) -> list[str]:
        indices = self.cluster.task_indices(job) if job in self.cluster.jobs else []
        return [self.cluster.task_address(job, index) for index in indices]


def read_task(resolver: "cluster_resolver.ClusterResolver") -> Task:
    """Return which task this process is, as a resolver says; nothing is checked."""
    # Slurm's resolver knows its task only after this call.
    cluster = resolver.cluster_spec()
    is_local = getattr(resolver, "rpc_layer", None) == "local"
    training = cluster_resolver.list_training_tasks(resolver)
    return Task(cluster, resolver.task_type, resolver.task_id, training, is_local)


def find_task(resolver: "cluster_resolver.ClusterResolver") -> Task:
    """Return which task this process is in a cluster of equal workers; job None for no cluster.

    Raises:
        ClusterError: As `cluster_resolver.find_own_task`.
    """
    job, index = cluster_resolver.find_own_task(resolver) or (None, None)
    return dataclasses.replace(read_task(resolver), job=job, index=index)
