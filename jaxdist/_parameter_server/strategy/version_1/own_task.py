"""Which task of a cluster this process is, for strategies of which each worker has its own."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxdist._called import refuse
from jaxdist._parameter_server.transport import check_addresses
from jaxdist._validate import show
from jaxdist.cluster_resolver import ClusterResolver
from jaxdist.errors import ArgumentTypeError, ClusterError

_JOBS = ("chief", "worker", "evaluator", "ps")
_EXAMPLE = (
    "ClusterSpec({'ps': ['host0:2222'], 'worker': ['host1:2222', 'host2:2222']}), "
    "task_type='worker', task_id=0"
)


@dataclasses.dataclass(frozen=True)
class OwnTask:
    """This process in its cluster.

    Args:
        ps: The addresses of the parameter servers.
        job: The job of this process.
        number: Its number in the job.
        is_chief: Whether it makes variables, and should write checkpoints.
        num_workers: How many processes read input: those of the jobs chief and worker; of an
            evaluator those of its job.
        index: The number of this process among them; None for a parameter server, which reads none.
        is_local: Whether all tasks are in this process.
    """

    ps: Sequence[str]
    job: str
    number: int
    is_chief: bool
    num_workers: int
    index: int | None
    is_local: bool

    @property
    def name(self) -> str:
        """The name of the task, as devices have it."""
        return f"/job:{self.job}/replica:0/task:{self.number}"


def read_own_task(resolver: Any) -> OwnTask | None:
    """Return which task of its cluster this process is; None if the resolver has no cluster.

    Raises:
        ArgumentTypeError: `resolver` is no `ClusterResolver`.
        ClusterError: The cluster has no parameter servers, or other jobs, or this task is none of
            it.
        ArgumentError: The address of a parameter server is no host and port.
    """
    if not isinstance(resolver, ClusterResolver):
        raise refuse(
            ArgumentTypeError,
            f"cluster_resolver={show(resolver)}.",
            "cluster_resolver is a ClusterResolver, which lists the tasks of the cluster.",
            "Pass for instance jaxdist.cluster_resolver.TFConfigClusterResolver(), or nothing.",
        )
    spec = resolver.cluster_spec()
    counts = {job: spec.num_tasks(job) for job in spec.jobs}
    if not counts:
        return None
    job, number = resolver.task_type, resolver.task_id
    if not job or number is None:
        raise _make_error(
            f"a cluster, and task_type={show(job)}, task_id={show(number)}",
            "Every worker runs the same script, so its resolver has to say which task it is.",
        )
    if not counts.get("ps"):
        raise _make_error(
            f"a cluster of the jobs {', '.join(counts)}",
            "Variables are on parameter servers, which are the tasks of the job 'ps'.",
        )
    for name in [*counts, job]:
        if name not in _JOBS:
            raise _make_error(f"the job {name!r}", f"The jobs are {', '.join(_JOBS)}.")
    for name in ("chief", "evaluator"):
        if counts.get(name, 0) > 1:
            raise _make_error(
                f"a cluster with {counts[name]} tasks of the job {name!r}",
                f"There is at most one {name}.",
            )
    # The cluster need not list the evaluator, which nobody connects to.
    if number >= counts.get(job, 1 if job == "evaluator" else 0):
        raise _make_error(
            f"task_type={job!r}, task_id={number}, and a cluster with {counts.get(job, 0)} tasks "
            "of that job",
            "The numbers of tasks begin at 0, and this process is one of them.",
        )
    first = counts.get("chief", 0)
    ps = [address for address in spec.job_tasks("ps") if address is not None]
    is_local = getattr(resolver, "rpc_layer", None) == "local"
    if not is_local:
        check_addresses({"ps": ps})
    return OwnTask(
        ps=ps,
        job=job,
        number=number,
        is_chief=job in ("chief", "evaluator") or (job, number, first) == ("worker", 0, 0),
        num_workers=1 if job == "evaluator" else first + counts.get("worker", 0),
        index={"worker": first + number, "ps": None}.get(job, 0),
        is_local=is_local,
    )


def _make_error(found: str, rule: str) -> ClusterError:
    return refuse(
        ClusterError, f"{found}.", rule, f"Pass for instance SimpleClusterResolver({_EXAMPLE})."
    )
