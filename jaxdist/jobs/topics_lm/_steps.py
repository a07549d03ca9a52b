"""The steps of the language model, inside a replica."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxdist.jobs.topics_lm._model import Transformer
from jaxdist.nn import example_keys
from jaxdist.training import reduce_and_update, weighted_sums

Batch = dict[str, jax.Array]


def byte_losses(model: Transformer, tokens: jax.Array, keys: jax.Array | None = None) -> jax.Array:
    """Return the cross-entropy in nats of all bytes but the first: `[b, s]` of `[b, s + 1]`."""
    tokens = tokens.astype(jnp.int32)
    logits = model(tokens[:, :-1], keys)
    targets = tokens[:, 1:, None]
    # A sum over one-hot rows instead of a gather: the logits may be sharded over the vocabulary,
    # and XLA would all-gather them for a gather.
    is_target = jnp.arange(logits.shape[-1])[None, None] == targets
    chosen = jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
    return jax.nn.logsumexp(logits, axis=-1) - chosen


def train_step(model: Transformer, optimizer: "nnx.Optimizer[Any]", batch: Batch) -> jax.Array:
    """Update the model in place, and return the mean loss over the global batch's bytes `[]`."""
    tokens = batch["tokens"]
    keys = None
    if model.config.dropout:
        # The key depends only on the step: a resumed run has the dropout of an uninterrupted one.
        key = jax.random.fold_in(jax.random.key(0), optimizer.step.get_value())
        keys = example_keys(key, tokens.shape[0])

    def total_loss(model: Transformer) -> jax.Array:
        return jnp.sum(byte_losses(model, tokens, keys))

    total, grads = nnx.value_and_grad(total_loss)(model)
    size = tokens[:, 1:].size
    count, total = reduce_and_update(model, optimizer, grads, size, total)
    return total / count


def evaluation_step(model: Transformer, batch: Batch, mask: jax.Array) -> Batch:
    """Return the sums over the real bytes of all replicas."""
    losses = byte_losses(model, batch["tokens"])
    length = batch["length"]
    is_real = jnp.arange(losses.shape[1])[None] < length[:, None]
    # Take the mean of each window, weighted by its length: the last window may be padded.
    means = jnp.sum(jnp.where(is_real, losses, 0.0), axis=1) / jnp.maximum(length, 1)
    return weighted_sums({"loss": means}, mask * length)
