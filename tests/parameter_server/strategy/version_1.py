"""Workers of version 1 in threads of this process, for tests."""

import itertools
import threading
from collections.abc import Callable
from typing import Any

import jaxdist
from jaxdist.cluster_resolver import ClusterSpec, SimpleClusterResolver

ParameterServerStrategy = jaxdist.compat.v1.experimental.ParameterServerStrategy
_NUMBERS = itertools.count()


def make_spec(workers: int = 2, servers: int = 2, chief: bool = False) -> ClusterSpec:
    """Return a cluster whose servers no other test has."""
    number = next(_NUMBERS)
    tasks = {
        "ps": [f"test-{number}-ps{n}:0" for n in range(servers)],
        "worker": [f"worker{n}:0" for n in range(workers - chief)],
    }
    return ClusterSpec(tasks | ({"chief": ["chief:0"]} if chief else {}))


def make_resolver(
    spec: ClusterSpec, job: str = "worker", number: int = 0, replicas: int = 1
) -> SimpleClusterResolver:
    """Return the resolver of one task."""
    return SimpleClusterResolver(
        spec,
        task_type=job,
        task_id=number,
        num_accelerators={"CPU": replicas},
        rpc_layer="local",
    )


def make_worker(replicas: int = 1, servers: int = 2) -> Any:
    """Return the strategy of the only worker of a cluster."""
    return ParameterServerStrategy(make_resolver(make_spec(1, servers), replicas=replicas))


def run_workers(
    script: Callable[[Any, int], Any], spec: ClusterSpec, replicas: int = 1
) -> list[Any]:
    """Run a script in all tasks of the jobs chief and worker, each in a thread.

    Args:
        script: Called with the strategy of the task, and its number among them.
        spec: The cluster.
        replicas: Of each worker.

    Returns:
        What the script returned in each task.
    """
    tasks = [
        (job, n)
        for job in ("chief", "worker")
        if job in spec.jobs
        for n in range(spec.num_tasks(job))
    ]
    found: dict[int, Any] = {}
    errors: list[BaseException] = []

    def run(index: int, job: str, number: int) -> None:
        try:
            resolver = make_resolver(spec, job, number, replicas)
            found[index] = script(ParameterServerStrategy(resolver), index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(n, *task)) for n, task in enumerate(tasks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    if errors:
        raise errors[0]
    assert len(found) == len(tasks), "a worker has not ended"
    return [found[n] for n in range(len(tasks))]
