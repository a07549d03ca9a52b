"""The configured optimizer of all tasks, and the update of a step."""

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
    """Make AdamW with the configured schedule. Call it in the scope of the training strategy."""
    peak, warmup = config.learning_rate, config.warmup_steps
    rate: optax.Schedule
    if config.schedule == "cosine":
        # optax refuses a decay that does not outlast its warm-up.
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
    num_examples: int | jax.Array,
) -> jax.Array:
    """Update the model in place with the gradients of the mean loss, and return the mean `[]`.

    The mean is over the examples of all replicas. Replicas may have different numbers of them.

    Args:
        model: The model.
        optimizer: Its optimizer, from `make_optimizer`.
        total: The sum of the losses over the examples of this replica.
        grads: The gradients of that sum.
        num_examples: The number of these examples.
    """
    replica = get_replica_context()
    count = jnp.float32(num_examples)
    # These transforms all-reduce the gradients themselves. A second all-reduce would multiply them.
    reduces = isinstance(optimizer.tx, (ShardedUpdate, CompressedUpdate))
    if reduces:
        total, count = replica.all_reduce(ReduceOp.SUM, (total, count))
    else:
        total, count, grads = replica.all_reduce(ReduceOp.SUM, (total, count, grads))
    # At least 1: a step may have no rows on any replica.
    divisor = jnp.maximum(count, 1)
    grads = jax.tree.map(lambda g: (g / divisor).astype(g.dtype), grads)
    optimizer.update(model, grads)
    return total / divisor
