"""The all-reduce algorithms for several workers."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from jaxdist._called import called, refuse
from jaxdist._collectives.algorithms.algorithm import group_all
from jaxdist._collectives.algorithms.by_name import check_name, make_algorithm
from jaxdist._collectives.cross_device.algorithmic import check_count
from jaxdist._collectives.cross_device.all_reduce import AllReduceCrossDeviceOps
from jaxdist._collectives.marks import AllReducePlan, Summing
from jaxdist._collectives.options import CommunicationOptions
from jaxdist._collectives.sums.packing import Entry, SumBySize
from jaxdist._devices import runtime
from jaxdist._mesh import ReplicaMesh
from jaxdist._processes import get_current_process
from jaxdist._validate import show
from jaxdist.errors import ArgumentError, DeviceError


@dataclasses.dataclass(frozen=True)
class AllReduceSpec:
    """One entry of a spec; a limit of -1 means no limit."""

    alg: str
    shards: int
    limit: int


def parse_specs(given: Any) -> tuple[AllReduceSpec, ...]:
    """Return the entries of a name, a tuple, a named tuple or a list of tuples.

    Raises:
        ArgumentError: A type, a length or an algorithm is wrong, shards are below 1, or the limits
            do not increase or do not end in -1.
    """
    if isinstance(given, str):
        entries = [_parse_entry((given,), given)]
    elif isinstance(given, tuple) and given and all(isinstance(one, tuple) for one in given):
        # One tuple is one entry, so this is most likely a list in the wrong brackets.
        raise refuse(
            f"all_reduce_spec={given!r}, a tuple of tuples.",
            "A tuple is one entry, (algorithm, shards, limit in bytes); several are a list.",
            f"Write a list: {list(given)!r}.",
        )
    elif isinstance(given, tuple):
        entries = [_parse_entry(given, given)]
    elif isinstance(given, list) and given:
        entries = [_parse_entry(one, given) for one in given]
    else:
        raise refuse(
            f"all_reduce_spec={show(given)}.",
            "all_reduce_spec is the name of an algorithm, a tuple (algorithm, shards, limit in "
            "bytes), or a list of such tuples.",
            "Pass for instance ('pscpu/pscpu', 2, -1).",
        )
    limits = [e.limit for e in entries]
    rising = limits[:-1] == sorted(set(limits[:-1]))
    if limits[-1] != -1 or -1 in limits[:-1] or not rising:
        raise refuse(
            f"all_reduce_spec={given!r}, with the limits {limits}.",
            "Limits increase from entry to entry, and the last one is -1, for all larger tensors.",
            # Valid limits that are similar to the wrong ones.
            f"Pass for instance limits {[*sorted(set(limits) - {-1})[: len(limits) - 1], -1]}.",
        )
    return tuple(entries)


def _parse_entry(one: Any, given: Any) -> AllReduceSpec:
    """Return one entry, checked."""
    if not isinstance(one, tuple):
        raise refuse(
            f"all_reduce_spec={given!r:.200} with the entry {show(one)}.",
            "Each entry is a tuple (algorithm, shards, limit in bytes).",
            "Pass for instance [('pscpu/pscpu', 2, -1)].",
        )
    if not 1 <= len(one) <= 3:
        raise refuse(
            f"all_reduce_spec={given!r}: {one!r} has {len(one)} elements.",
            "An entry has one to three elements: (algorithm, shards, limit in bytes).",
            "Pass for instance ('pscpu/pscpu', 2, -1).",
        )
    alg, shards, limit = (*one, *(1, -1)[len(one) - 1 :])
    check_name(alg)
    for name, value, least in (("shards", shards, 1), ("limit", limit, -1)):
        if isinstance(value, bool) or not hasattr(value, "__index__") or value < least:
            raise refuse(
                f"all_reduce_spec={given!r}, with {name}={value!r} in {one!r}.",
                "shards is an integer from 1 up; limit is a number of bytes, or -1 for none.",
                f"Pass for instance ({alg!r}, 1, -1).",
            )
    return AllReduceSpec(str(alg), int(shards), int(limit))


_TASK = re.compile(r"/job:(?P<job>\w+)(/replica:\d+)?/task:(?P<task>\d+)$", re.IGNORECASE)


class MultiWorkerAllReduce(AllReduceCrossDeviceOps):
    """All-reduce algorithms that know the workers of the replicas.

    A worker is a group of neighbouring replicas: the first `num_gpus_per_worker` replicas are the
    first worker, and so on. Between processes, the workers are the processes. On one machine, they
    are groups of its devices.

    Args:
        worker_devices: Device strings of the workers: tasks (`'/job:worker/task:0'`), or one
            device of each (`'cpu:0'`).
        num_gpus_per_worker: Replicas of each worker. 0 is one replica, on the CPU of the worker.
        all_reduce_spec: A tuple, a named tuple, or a list of tuples:

            - The name of the algorithm: `'nccl'`, `'nccl/xring'`, `'nccl/rechd'`, `'nccl/pscpu'`,
              `'xring'`, `'pscpu'`, `'psgpu'` or `'pscpu/pscpu'`. Of two names with a slash, the
              first reduces within a worker and the second across workers.
            - The number of shards: after packing, each tensor is divided into this many shards.
              Each shard has an all-reduce of its own, and these run at the same time.
            - The largest tensor, in bytes, that this entry takes. Limits increase from entry to
              entry, and the last is -1, which means no limit.
        num_packs: As for `AllReduceCrossDeviceOps`.
        agg_small_grads_max_bytes: As for `AllReduceCrossDeviceOps`.
        agg_small_grads_max_group: As for `AllReduceCrossDeviceOps`.

    Raises:
        ArgumentError: The spec is invalid. There are no workers, or a worker occurs twice. When a
            strategy uses it: the workers have a different number of replicas from the strategy.
        DeviceError: A worker does not exist.

    Cost:
        For `R` replicas and `S` bytes: `nccl` is one all-reduce. `xring` is `2 (R-1)` permutes of
        `S/R`. `psgpu` and `pscpu` are `2 ceil(log2 R)` permutes of `S` (on TPU and GPU, `pscpu` is
        an all-gather and a sum on the hosts). In two levels, with `G` replicas in a worker, each
        device sends `S/G` between workers.

    Example:
        >>> ops = jaxdist.contrib.MultiWorkerAllReduce(
        ...     ["/job:worker/task:0", "/job:worker/task:1"], num_gpus_per_worker=4,
        ...     all_reduce_spec=[("nccl", 1, 1024), ("nccl/xring", 2, -1)])
        >>> strategy = MirroredStrategy(cross_device_ops=ops)
        >>> def step(x):
        ...     return get_replica_context().all_reduce("sum", x)
        >>> strategy.run(step, (PerReplica(np.ones((8, 3), "float32")),)).tolist()
        [8.0, 8.0, 8.0]

    Source:
        `tf.contrib.distribute.MultiWorkerAllReduce`.
    """

    @called("MultiWorkerAllReduce")
    def __init__(
        self,
        worker_devices: Sequence[str],
        num_gpus_per_worker: int,
        all_reduce_spec: Any = ("pscpu/pscpu", 2, -1),
        num_packs: int = 0,
        agg_small_grads_max_bytes: int = 0,
        agg_small_grads_max_group: int = 10,
    ) -> None:
        self.worker_devices = _check_workers(worker_devices)
        self.num_gpus_per_worker = check_count("num_gpus_per_worker", num_gpus_per_worker, least=0)
        self.all_reduce_spec: tuple[AllReduceSpec, ...] = parse_specs(all_reduce_spec)
        self.all_reduce_alg = self.all_reduce_spec[-1].alg
        self._set_packing(num_packs, agg_small_grads_max_bytes, agg_small_grads_max_group)

    @property
    def replicas_per_worker(self) -> int:
        """The number of replicas of each worker.

        Example:
            >>> jaxdist.contrib.MultiWorkerAllReduce(["cpu:0"], 0).replicas_per_worker
            1
        """
        return max(self.num_gpus_per_worker, 1)

    @called(lambda self: repr(self))
    def summing(
        self, leaves: Sequence[Any], layout: ReplicaMesh, options: CommunicationOptions
    ) -> tuple[AllReducePlan, Summing]:
        """Return one algorithm for each entry of the spec."""
        local, workers = self.replicas_per_worker, len(self.worker_devices)
        if local * workers != layout.num_replicas:
            raise ArgumentError(
                f"{self!r} has {workers} worker(s) of {local} replica(s), {local * workers} "
                f"together, and it is used with {layout.num_replicas} replicas.\n\n"
                "The workers together have all replicas.\n\n" + self._suggest(layout.num_replicas)
            )
        entries = tuple(
            Entry(make_algorithm(s.alg, local=local, platform=layout.platform), s.shards, s.limit)
            for s in self.all_reduce_spec
        )
        on_cpu = layout.platform == "cpu" and any("pscpu" in s.alg for s in self.all_reduce_spec)
        reason = repr(self) + (
            "; on CPU the host is the device, so pscpu reduces at the first replica" * on_cpu
        )
        level = group_all(layout)
        name = ", ".join(f"{s.alg} x {s.shards}" for s in self.all_reduce_spec)
        return AllReducePlan(name, reason), SumBySize(level, entries, self.packing, self.is_packed)

    def _suggest(self, count: int) -> str:
        """Return the sentence that says which number of workers or replicas would match."""
        workers = len(self.worker_devices)
        if count % workers == 0:
            return f"Pass num_gpus_per_worker={count // workers}."
        fitting = [n for n in range(1, count + 1) if count % n == 0]
        return f"Pass worker_devices with one of {fitting} names."

    def __repr__(self) -> str:
        spec = list(map(dataclasses.astuple, self.all_reduce_spec))
        return (
            f"MultiWorkerAllReduce({list(self.worker_devices)}, {self.num_gpus_per_worker}, "
            f"{spec}, num_packs={self.num_packs})"
        )


def _check_workers(given: Any) -> tuple[str, ...]:
    """Check the names of the workers, and return them."""
    names = tuple(given) if isinstance(given, (list, tuple)) else ()
    if not names or not all(isinstance(n, str) and n for n in names):
        raise refuse(
            f"worker_devices={show(given)}.",
            "worker_devices is a list of device strings, one for each worker.",
            "Pass for instance ['/job:worker/task:0', '/job:worker/task:1'].",
        )
    tasks = [_TASK.match(n) for n in names]
    workers: list[Any] = []
    for name, task in zip(names, tasks, strict=True):
        if task is None:
            workers.append(
                runtime.device_from_name(name, "MultiWorkerAllReduce(worker_devices=...)")
            )
            continue
        # Names are compared as devices and tasks, since one worker may have several spellings.
        workers.append((task["job"].lower(), int(task["task"])))
        processes = get_current_process().count
        several = processes > 1
        count = processes if several else len(names)
        if int(task["task"]) >= count:
            known = [f"/job:{task['job']}/task:{n}" for n in range(count)]
            what = f"the job has {count} processes" if several else f"there are {count} workers"
            raise refuse(
                f"the worker {name!r}, and {what}.",
                f"Tasks are numbered from 0 to {count - 1}.",
                f"Pass {known}.",
                kind=DeviceError,
            )
    if len(set(workers)) < len(names):
        raise refuse(
            f"worker_devices={list(names)}, which has one worker twice.",
            "worker_devices lists each worker once.",
            "Leave the second one out.",
        )
    return names
