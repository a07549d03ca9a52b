"""The configured optimizer, the same for all tasks, and how a step updates with it."""

from typing import Any

import jax
import optax
from flax import nnx

from jaxdist.collectives import ReduceOp
from jaxdist.strategies import get_replica_context
from jaxdist.training._schema import OptimizerConfig
from jaxdist.update import CompressedUpdate, ShardedUpdate, compressed_update, sharded_update


def make_optimizer(
    model: nnx.Module, config: OptimizerConfig, *, num_steps: int
) -> "nnx.Optimizer[Any]":
    """AdamW with the configured schedule, made in the scope of the strategy that trains."""
    peak, warmup = config.learning_rate, config.warmup_steps
    rate: optax.Schedule
    if config.schedule == "cosine":
        rate = optax.warmup_cosine_decay_schedule(0.0, peak, warmup, max(num_steps, warmup + 1))
    else:
        rate = optax.join_schedules(
            [optax.linear_schedule(0.0, peak, max(warmup, 1)), optax.constant_schedule(peak)],
            [warmup],
        )
    transform: optax.GradientTransformation = optax.adamw(rate, weight_decay=config.weight_decay)
    if config.clip_norm:
        transform = optax.chain(optax.clip_by_global_norm(config.clip_norm), transform)
    if config.update == "sharded":
        transform = sharded_update(transform)
    elif config.update == "compressed":
        transform = compressed_update(transform, config.compression, workers=config.workers)
    return nnx.Optimizer(model, transform, wrt=nnx.Param)


def reduced_update(
    model: nnx.Module, optimizer: "nnx.Optimizer[Any]", loss: jax.Array, grads: Any
) -> jax.Array:
    """Update the model in place by the mean of the gradients; the mean loss `[]`.

    Replicas have equal shares of the batch, so the mean of their means is the global mean.
    """
    if isinstance(optimizer.tx, (ShardedUpdate, CompressedUpdate)):
        mean: jax.Array = get_replica_context().all_reduce(ReduceOp.MEAN, loss)
    else:
        mean, grads = get_replica_context().all_reduce(ReduceOp.MEAN, (loss, grads))
    optimizer.update(model, grads)
    return mean
