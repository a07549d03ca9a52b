"""The configured optimizer of all tasks."""

from typing import Any

import optax
from flax import nnx

from jaxdist._update import compressed_update, sharded_update
from jaxdist.jobs._config.schema import OptimizerConfig


def make_optimizer(
    model: nnx.Module, config: OptimizerConfig, *, num_steps: int
) -> "nnx.Optimizer[Any]":
    """Make AdamW with the configured schedule. Call it in the scope of the training strategy."""
    peak, warmup = config.learning_rate, config.warmup_steps
    rate: optax.Schedule
    if config.schedule == "cosine":
        # optax refuses a decay that is not longer than its warm-up.
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
