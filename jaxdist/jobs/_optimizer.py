"""The configured optimizer, the same for all tasks, and how a step updates with it."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jaxdist._collectives import ReduceOp
from jaxdist._strategies import get_replica_context
from jaxdist._update import CompressedUpdate, ShardedUpdate, compressed_update, sharded_update
from jaxdist.jobs._config.schema import OptimizerConfig


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
        transform = sharded_update(transform, reduce_op="sum")
    elif config.update == "compressed":
        transform = compressed_update(
            transform, config.compression, workers=config.workers, reduce_op="sum"
        )
    return nnx.Optimizer(model, transform, wrt=nnx.Param)


def reduce_and_update(
    model: nnx.Module,
    optimizer: "nnx.Optimizer[Any]",
    total: jax.Array,
    grads: Any,
    num_examples: int,
) -> jax.Array:
    """Update the model in place by the gradients of the mean loss, and return that mean `[]`.

    The mean is over the examples of all replicas, however many each of them has.

    Args:
        model: What is trained.
        optimizer: Its optimizer, from `make_optimizer`.
        total: The sum of the losses of the examples of this replica.
        grads: The gradients of that sum.
        num_examples: How many examples these are.
    """
    replica = get_replica_context()
    count = jnp.float32(num_examples)
    # These all-reduce the gradients themselves.
    reduces = isinstance(optimizer.tx, (ShardedUpdate, CompressedUpdate))
    if reduces:
        total, count = replica.all_reduce(ReduceOp.SUM, (total, count))
    else:
        total, count, grads = replica.all_reduce(ReduceOp.SUM, (total, count, grads))
    divisor = jnp.maximum(count, 1)
    grads = jax.tree.map(lambda g: (g / divisor).astype(g.dtype), grads)
    optimizer.update(model, grads)
    return total / divisor
