"""The devices of one worker, which run its replicas."""

from typing import Any

import jax

from jaxdist import _mesh
from jaxdist._called import refuse
from jaxdist._devices import runtime
from jaxdist.cluster_resolver import (
    ClusterResolver,
    SimpleClusterResolver,
    TFConfigClusterResolver,
)
from jaxdist.errors import DeviceError, UnsupportedError


def find_worker_layouts(resolver: Any, workers: int) -> list[_mesh.ReplicaMesh]:
    """Return the replicas of each worker of a cluster.

    Workers in other processes run on one device, and their layout stands for them.

    Raises:
        DeviceError: There are fewer devices.
        UnsupportedError: Several replicas for workers in other processes.
    """
    if getattr(resolver, "rpc_layer", None) == "local":
        found = [find_worker_devices(resolver, n, workers) for n in range(workers)]
        return [_mesh.build(devices) for devices in found]
    kind, count = _read_stated(resolver)
    # Other resolvers count what a task has, which is no wish.
    if count > 1 and isinstance(resolver, SimpleClusterResolver):
        raise refuse(
            f"a resolver with num_accelerators={{{(kind or '').upper()!r}: {count}}}, and workers "
            "in other processes.",
            "A worker of its own process runs a function on one device; with rpc_layer='local' it "
            "may have several.",
            f"List {count} workers for each machine, with one device each, and leave "
            "num_accelerators out.",
            kind=UnsupportedError,
        )
    return [_mesh.build(jax.local_devices()[:1])] * workers


def find_layout_of_new_worker(
    resolver: Any, index: int, first: _mesh.ReplicaMesh
) -> _mesh.ReplicaMesh:
    """Return the replicas of a worker that joins those of this process.

    It has as many as the others, and devices of its own if these are several.

    Args:
        resolver: The resolver of the cluster.
        index: The number of the new worker.
        first: The replicas of the first worker.

    Raises:
        DeviceError: There are fewer devices.
    """
    kind, _ = _read_stated(resolver)
    present, count = runtime.local_devices(kind), first.num_replicas
    if count == 1:
        return _mesh.build([present[index % len(present)]])
    if len(present) < count * (index + 1):
        raise DeviceError(
            f"ClusterCoordinator.add_worker was called for worker {index}, with {count} replicas "
            f"as the others; this process has {len(present)} devices.\n\n"
            "Each replica of a worker runs on a device of its own.\n\n"
            "List fewer accelerators for each worker in the resolver, or start the worker as a "
            "process of its own."
        )
    return _mesh.build(present[index * count : (index + 1) * count])


def find_worker_devices(resolver: Any, index: int = 0, sharers: int = 1) -> list[jax.Device]:
    """Return the devices of one worker.

    They are as many as `resolver.num_accelerators()` says. If it says nothing, they are the
    accelerators of this process, or one CPU device if there are none.

    Args:
        resolver: The resolver of the cluster.
        index: The number of the worker among those that share the devices of this process.
        sharers: How many workers share them. Those with several replicas have devices of their own,
            because two programs that wait for each other's devices would wait for ever.

    Raises:
        DeviceError: There are fewer devices.
    """
    kind, count = _read_stated(resolver)
    present = runtime.local_devices(kind)
    if not count:
        count = 1 if present[0].platform == "cpu" else max(1, len(present) // sharers)
    if count == 1 and present:
        return [present[index % len(present)]]
    if len(present) < count * sharers:
        raise refuse(
            f"a resolver with num_accelerators={{{(kind or '').upper()!r}: {count}}} for each of "
            f"{sharers} worker(s) in this process, which has {len(present)} such devices.",
            "Each replica of a worker runs on a device of its own.",
            f"Pass num_accelerators={{{(kind or '').upper()!r}: {len(present) // sharers}}}, or "
            "leave it out.",
            kind=DeviceError,
        )
    return present[index * count : (index + 1) * count]


def _read_stated(resolver: Any) -> tuple[str | None, int]:
    """Return the kind and the number of devices that a resolver states; 0 for none."""
    # These count the devices of this process, as is done here without them.
    own = type(resolver).num_accelerators is ClusterResolver.num_accelerators
    if own or isinstance(resolver, TFConfigClusterResolver):
        return None, 0
    stated: dict[str, int] = {k.lower(): n for k, n in resolver.num_accelerators().items()}
    used = {kind: n for kind, n in stated.items() if n}
    if stated and not used:
        return "cpu", 1
    # A worker with GPUs also has CPUs, which are no replicas then.
    for kind, n in sorted(used.items(), key=lambda entry: entry[0] == "cpu"):
        return kind, n
    return None, 0
