"""Sums of strategies over processes with each implementation of cross-device reductions."""

from typing import Any

import jax
import numpy as np

import jaxdist

_WORKERS = ["/job:worker/task:0", "/job:worker/task:1"]
SPECS = ["nccl", "xring", "pscpu", "psgpu", "nccl/xring", "nccl/rechd", "pscpu/pscpu"]


def make_ops() -> dict[str, Any]:
    """Return the implementations, for 2 workers with 2 replicas each."""
    several = {
        spec: jaxdist.contrib.MultiWorkerAllReduce(_WORKERS, 2, all_reduce_spec=(spec, 1, -1))
        for spec in SPECS
    }
    return {
        "one device": jaxdist.ReductionToOneDevice(),
        "nccl packs": jaxdist.NcclAllReduce(num_packs=2),
        "hierarchical": jaxdist.HierarchicalCopyAllReduce(num_packs=1),
        **several,
    }


def run_with_ops(strategy_of: Any = None) -> dict[str, Any]:
    """Add up in a step and across replicas with each implementation."""
    make = strategy_of
    if make is None:
        # Some implementations look at the devices, so the processes meet before.
        resolver = jaxdist.cluster_resolver.TFConfigClusterResolver()
        jaxdist.config.experimental_connect_to_cluster(resolver)
        make = _make_over_processes
    return {name: _run(make(ops)) for name, ops in make_ops().items()}


def _make_over_processes(ops: Any) -> jaxdist.Strategy:
    return jaxdist.MultiWorkerMirroredStrategy(cross_device_ops=ops)


def run_on_one_process() -> dict[str, Any]:
    """The same on 4 devices of one process."""
    devices = jax.devices()[:4]
    return run_with_ops(lambda ops: jaxdist.MirroredStrategy(devices, cross_device_ops=ops))


def _run(strategy: Any) -> Any:
    rows = np.arange(4 * 6 * 5, dtype="float32").reshape(4, 6, 5)
    x = strategy.experimental_distribute_values_from_function(
        lambda c: rows[c.replica_id_in_sync_group]
    )

    def step(x: Any) -> Any:
        replica = jaxdist.get_replica_context()
        assert replica is not None
        return replica.all_reduce("sum", [x, x[0] * 2]), replica.all_reduce("mean", x[:, 0])

    results = strategy.run(step, (x,))
    outside = strategy.reduce("sum", x, axis=None), strategy.reduce("mean", x, axis=0)
    groups = sorted(
        (c.kind, c.group_size) for c in strategy.lower(step, (x,)).compile().collectives
    )
    return jax.tree.map(np.asarray, (results, outside)), groups
