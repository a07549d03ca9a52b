"""Jobs of several processes in one: a thread stands for each process, with one store for all."""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np

from jaxdist import PerReplica
from jaxdist import _mesh as meshes
from jaxdist._mesh import ReplicaMesh
from jaxdist._processes import Agreement, LocalStore, Process
from jaxdist.data import AutoShardPolicy, InputOptions, PartialBatch
from tests.processes.views import view_from

T = TypeVar("T")
TOO_LONG_S = 60.0

# For each number of processes, who owns which of the replicas.
JOBS = {1: (0, 0, 0, 0), 2: (0, 0, 1, 1), 3: (0, 1, 1, 2, 2, 2), 4: (0, 1, 2, 3, 3, 3, 3, 3)}


def run_job(
    owners: tuple[int, ...], work: Callable[[ReplicaMesh, Agreement], T]
) -> list[T | BaseException]:
    """What `work` returns, or raises, in each process of a job."""
    count = max(owners) + 1
    layout = meshes.build(jax.devices()[: len(owners)])
    store = LocalStore()
    found: list[Any] = [None] * count

    def run(index: int) -> None:
        view = view_from(layout, index, owners, count)
        try:
            found[index] = work(view, Agreement(store, Process(index, count)))
        except BaseException as error:
            found[index] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TOO_LONG_S)
    assert not any(t.is_alive() for t in threads), "a process waits for ever"
    return found


def run_well(owners: tuple[int, ...], work: Callable[[ReplicaMesh, Agreement], T]) -> list[T]:
    """What `work` returns in each process; it raises what the first process raises."""
    results = run_job(owners, work)
    values = []
    for one in results:
        if isinstance(one, BaseException):
            raise one
        values.append(one)
    return values


def on_host(
    partial: PartialBatch = PartialBatch.UNEVEN,
    policy: AutoShardPolicy | None = None,
    depth: int = 1,
) -> InputOptions:
    """Options whose values stay on the host, where a process need not have a device for each."""
    return InputOptions(
        False,
        experimental_per_replica_buffer_size=depth,
        partial_batch=partial,
        auto_shard_policy=policy,
    )


def ids_of(step: Any, partial: PartialBatch = PartialBatch.UNEVEN) -> list[list[int]]:
    """The real examples of each local replica in one step."""

    def values(leaf: Any) -> list[Any]:
        held = leaf.values if isinstance(leaf, PerReplica) else (leaf,)
        return [np.asarray(v) for v in held]

    if partial is not PartialBatch.PAD:
        return [v.tolist() for v in values(step)]
    batch, mask = step
    return [v[m].tolist() for v, m in zip(values(batch), values(mask), strict=True)]


def join(
    owners: tuple[int, ...], of_processes: list[list[list[list[int]]]]
) -> list[list[list[int]]]:
    """The steps of all replicas, in their order, from those of each process."""
    assert len({len(steps) for steps in of_processes}) == 1, "all have equally many steps"
    joined = []
    for parts in zip(*of_processes, strict=True):
        left = [iter(part) for part in parts]
        joined.append([next(left[owner]) for owner in owners])
    return joined
