"""`OwnTask`: which task of the job this process is, from `TF_CONFIG` or the cluster."""

import dataclasses
import json
import os
from typing import Any

from jaxdist._cluster import Task, read_task
from jaxdist._validate import show
from jaxdist.cluster_resolver import ClusterSpec, choose_resolver, find_source
from jaxdist.errors import ArgumentTypeError, ClusterError

_CALLER = "estimator.RunConfig"
_EXAMPLE = (
    '{"cluster": {"chief": ["host0:2222"], "worker": ["host1:2222"], "ps": ["host2:2222"]}, '
    '"task": {"type": "chief", "index": 0}}'
)


class TaskType:
    """The jobs of a cluster.

    Attributes:
        CHIEF: Trains, and writes checkpoints.
        WORKER: Trains.
        PS: Holds variables.
        EVALUATOR: Follows the checkpoints; not part of the cluster.
        MASTER: In older versions of TensorFlow, a chief that also evaluates.

    Source:
        `tf.estimator.TaskType`, `tensorflow_estimator` 1.15.
    """

    MASTER = "master"
    PS = "ps"
    WORKER = "worker"
    CHIEF = "chief"
    EVALUATOR = "evaluator"


@dataclasses.dataclass(frozen=True)
class OwnTask:
    """One task of a job.

    Args:
        cluster: The tasks; empty for an evaluator, and without a cluster.
        task_type: The job of this process.
        task_id: Its number in the job.
        is_chief: Whether it writes checkpoints and summaries.
        master: The address of this task, as `grpc://host:port`; empty without a cluster.
        evaluation_master: The address that an evaluator got.
        num_ps: How many parameter servers there are.
        num_workers: How many processes train.
        global_id: The number of this process among all; None for an evaluator.
        service: The object `service` of `TF_CONFIG`.
        model_dir: The folder in `TF_CONFIG`.
        has_cluster: Whether `TF_CONFIG` has a cluster.
    """

    cluster: ClusterSpec
    task_type: str
    task_id: int
    is_chief: bool
    master: str = ""
    evaluation_master: str = ""
    num_ps: int = 0
    num_workers: int = 1
    global_id: int | None = 0
    service: dict[str, Any] | None = None
    model_dir: str | None = None
    has_cluster: bool = False


def read_own_task(*, needs_chief: bool) -> OwnTask:
    """Return which task this process is.

    Args:
        needs_chief: Whether the cluster must have a chief. Strategies use worker 0 if it has none.

    Raises:
        ClusterError: `TF_CONFIG` is not valid.
        ArgumentTypeError: `TF_CONFIG` has a value of the wrong type.
    """
    task = read_task(choose_resolver())
    given: dict[str, Any] = json.loads(os.environ.get("TF_CONFIG", "{}"))
    kinds = (("service", dict, "an object"), ("model_dir", str, "the path of a folder"))
    for key, kind, what in kinds:
        if not isinstance(given.get(key), (kind, type(None))):
            raise ArgumentTypeError(
                f"{_CALLER} read TF_CONFIG, in which {key!r} is {show(given[key])}.\n\n"
                f"{key!r} is {what}.\n\nLeave it out of TF_CONFIG."
            )
    shared: dict[str, Any] = {key: given.get(key) for key, _, _ in kinds}
    shared["has_cluster"] = bool(task.cluster)
    if not task.cluster:
        job, index = task.job or TaskType.WORKER, task.index or 0
        if (job, index) != (TaskType.WORKER, 0):
            raise _fault(
                f"with the task {task.job} {task.index} and without a cluster",
                "Without a cluster the only task is worker 0.",
            )
        master = str(given.get("session_master") or "")
        return OwnTask(task.cluster, job, index, True, master, **shared)
    chief = TaskType.MASTER if TaskType.MASTER in task.counts else TaskType.CHIEF
    job, index = _check_task(task, chief, needs_chief=needs_chief)
    if job == TaskType.EVALUATOR:
        master = str(given.get("eval_session_master") or "")
        return OwnTask(
            ClusterSpec({}),
            job,
            index,
            False,
            evaluation_master=master,
            num_workers=0,
            global_id=None,
            **shared,
        )
    counts = task.counts
    # The chief comes first, and the parameter servers come last.
    others = sorted(name for name in counts if name not in (chief, TaskType.PS))
    order = [name for name in (chief, *others, TaskType.PS) if name in counts]
    ids = [(name, i) for name in order for i in task.cluster.task_indices(name)]
    return OwnTask(
        task.cluster,
        job,
        index,
        job == TaskType.MASTER or (task.is_chief and TaskType.MASTER not in counts),
        str(given.get("session_master") or f"grpc://{task.cluster.task_address(job, index)}"),
        num_ps=counts.get(TaskType.PS, 0),
        num_workers=counts.get(TaskType.WORKER, 0) + counts.get(chief, 0),
        global_id=ids.index((job, index)),
        **shared,
    )


def _check_task(task: Task, chief: str, *, needs_chief: bool) -> tuple[str, int]:
    counts, job, index = task.counts, task.job, task.index
    found = ", ".join(f"{count} {name}" for name, count in counts.items())
    if counts.get(chief, 0) > 1 or (needs_chief and chief not in counts):
        raise _fault(f"with a cluster of {found}", f"A cluster has exactly one {chief}.")
    if chief == TaskType.MASTER:
        for name in (TaskType.CHIEF, TaskType.EVALUATOR):
            if name in counts or job == name:
                raise _fault(
                    f"with a cluster of {found} and the task {job}",
                    f"A cluster with a master has no {name}: the master is both.",
                )
    if not job or index is None:
        raise _fault(
            f"with a cluster, and a task of the type {job!r} and the index {index!r}",
            "In a cluster, 'task' says which of its tasks this process is.",
        )
    # An evaluator is not part of the cluster.
    if job != TaskType.EVALUATOR and not task.is_listed:
        raise _fault(
            f"with a cluster of {found} and the task {job} {index}",
            "The task is one of the cluster, or an evaluator.",
        )
    return job, index


def _fault(found: str, rule: str) -> ClusterError:
    source = find_source(os.environ)
    remedy = f"Set for instance TF_CONFIG='{_EXAMPLE}'."
    if source.name not in ("tf_config", "none"):
        # These clusters have workers only.
        remedy = (
            f"Pass {_CALLER}(train_distribute=jaxdist.MultiWorkerMirroredStrategy()), with which "
            "worker 0 is the chief, or set JAXDIST_CLUSTER=none if this process works alone."
        )
    return ClusterError(
        f"{_CALLER} read {source.because or 'TF_CONFIG'} {found}.\n\n{rule}\n\n{remedy}"
    )
