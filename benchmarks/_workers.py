"""Training over several processes: through `MultiWorkerMirroredStrategy`, and by hand."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxdist
from benchmarks._joined import joined
from benchmarks._loop import Loop
from benchmarks._models import Batch, Params, model, sgd
from benchmarks._steps import AXIS, DONATE, P, api_step, training_loop
from jaxdist.cluster_resolver import ClusterSpec, SimpleClusterResolver

# By hand and through jaxdist alike: a step between processes waits for the one before.
WAIT_EVERY = 1


def api_workers(rank: int, ports: list[int], name: str, seconds: float | None = None) -> Loop:
    """Training through `strategy.run`, with all that jaxdist does between processes.

    Args:
        rank: Number of the process.
        ports: The port of each process.
        name: Name of the model.
        seconds: `timeout_seconds` of the strategy.
    """
    spec = ClusterSpec({"worker": [f"127.0.0.1:{port}" for port in ports]})
    resolver = SimpleClusterResolver(spec, task_type="worker", task_id=rank)
    options = jaxdist.experimental.CommunicationOptions(timeout_seconds=seconds)
    strategy = jaxdist.MultiWorkerMirroredStrategy(resolver, options)
    params, batch, loss_fn = model(name)
    step = api_step(loss_fn)
    split = jax.tree.map(lambda x: _split(x, strategy.layout.mesh, strategy.replica_axes[0]), batch)

    def call(params: Params, batch: Batch) -> tuple[Params, jax.Array]:
        result: tuple[Params, jax.Array] = strategy.run(step, (params, batch), options=DONATE)
        return result

    params = jax.tree.map(lambda x: _copy_to_all(x, strategy.layout.mesh), params)
    return training_loop(call, params, split, wait_every=WAIT_EVERY)


def hand_workers(rank: int, ports: list[int], name: str) -> Loop:
    """Training by `jit(shard_map)`, with one `pmean` of all gradients."""
    mesh = Mesh(np.asarray(joined(rank, ports).devices, dtype=object), (AXIS,))
    params, batch, loss_fn = model(name)

    def step(params: Params, batch: Batch) -> tuple[Params, jax.Array]:
        found = jax.value_and_grad(loss_fn)(params, batch)
        loss, grads = jax.lax.pmean(found, AXIS)
        return sgd(params, grads), loss

    mapped = jax.jit(
        jax.shard_map(step, mesh=mesh, in_specs=(P(), P(AXIS)), out_specs=P(), check_vma=False),
        donate_argnums=0,
    )
    params = jax.tree.map(lambda x: _copy_to_all(x, mesh), params)
    split = jax.tree.map(lambda x: _split(x, mesh, AXIS), batch)
    return training_loop(mapped, params, split, wait_every=WAIT_EVERY)


def _split(value: Any, mesh: Mesh, axis: str) -> jax.Array:
    sharding = NamedSharding(mesh, PartitionSpec(axis))
    whole = np.asarray(value)
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])


def _copy_to_all(value: Any, mesh: Mesh) -> jax.Array:
    whole = np.asarray(value)
    sharding = NamedSharding(mesh, PartitionSpec())
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])
