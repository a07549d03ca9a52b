"""Which processes have to agree."""

from typing import Any

from jaxdist._processes import Process, get_process_of_job
from jaxdist._validate import check_instance
from jaxdist.cluster_resolver import ClusterResolver
from jaxdist.errors import ArgumentError, ContextError, UnsupportedError

# Tasks that train together.
_TRAINING = ("chief", "worker")


def find_members(caller: str, resolver: Any) -> Process:
    """Return this process among those that train together.

    Raises:
        ArgumentTypeError: No resolver.
        UnsupportedError: A cluster with parameter servers.
        ContextError: Several tasks, and this process has not joined them.
        ArgumentError: Other tasks than those that this process has joined.
    """
    remedy = "Pass strategy.cluster_resolver, or None for the processes that were joined."
    kinds = (ClusterResolver, type(None))
    check_instance(caller, "cluster_resolver", resolver, kinds, "a ClusterResolver", remedy)
    joined = get_process_of_job()
    tasks: dict[str, Any] = {} if resolver is None else resolver.cluster_spec().as_dict()
    if "ps" in tasks:
        raise UnsupportedError(
            f"{caller} was given a cluster with parameter servers: {sorted(tasks)}.\n\n"
            "It saves at one step of all workers, and workers of parameter servers have steps of "
            "their own.\n\nSave with training.Checkpoints from the coordinator."
        )
    if resolver is not None and resolver.task_type == "evaluator":
        return Process(0, 1)
    count = sum(len(tasks.get(name, ())) for name in _TRAINING)
    if count > 1 and joined is None:
        raise ContextError(
            f"{caller} was given a cluster of {count} tasks, and this process has joined no "
            "other.\n\n"
            "The processes agree over their connection.\n\n"
            "Make the strategy first: MultiWorkerMirroredStrategy(cluster_resolver=resolver)."
        )
    if count > 1 and joined is not None and joined.count != count:
        raise ArgumentError(
            f"{caller} was given a cluster of {count} tasks, and this process has joined "
            f"{joined.count}.\n\n"
            "All processes of the job save together.\n\n"
            "Pass strategy.cluster_resolver of the strategy that trains."
        )
    return joined or Process(0, 1)
