"""A table of embeddings with a dense layer, and steps that move only the rows of a batch."""

import dataclasses
import sys
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from msgspec import Meta

from jaxdist import IndexedSlices, Variable, VariableAggregation
from jaxdist.jobs import Table, entry
from jaxdist.nn import embedding_lookup
from jaxdist.training import reduce_and_update, weighted_sums

Batch = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The size of the table, the number of words that are predicted, and the table's own rate."""

    rows: Annotated[int, Meta(ge=16, le=2**31 - 2)] = entry(2**22, change="never")
    width: Annotated[int, Meta(ge=1, le=4096)] = entry(64, change="never")
    classes: Annotated[int, Meta(ge=2, le=65536)] = entry(256, change="never")
    table_learning_rate: Annotated[float, Meta(gt=0, le=sys.float_info.max)] = entry(1.0)


class NextWordNet(nnx.Module):
    """The logits of the next word, from the mean of the rows of the features.

    The table is not an NNX variable, so no optimizer and no gradient has its size: the step
    changes its rows by SGD.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        self.table_learning_rate = config.table_learning_rate
        shape = (config.rows, config.width)
        # Zeros would learn nothing if there were one more layer; here the dense layer breaks ties.
        self.table = Table(
            lambda: Variable(
                lambda: jnp.zeros(shape, jnp.float32),
                trainable=False,
                name="table",
                shape=shape,
                dtype=jnp.float32,
                aggregation=VariableAggregation.SUM,
            )
        )
        self.logits = nnx.Linear(config.width, config.classes, rngs=rngs)

    def __call__(self, rows: jax.Array) -> jax.Array:
        """Return the logits `[b, class]` of the features' rows `[b, feature, width]`."""
        return self.logits(jnp.mean(rows, axis=1))


def row_losses(net: NextWordNet, rows: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Return the cross-entropy of each example `[b]`, and the logits `[b, class]`."""
    logits = net(rows)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]), logits


def total_loss(net: NextWordNet, rows: jax.Array, batch: Batch) -> jax.Array:
    """Return the sum of the cross-entropy over the examples of this replica."""
    return jnp.sum(row_losses(net, rows, batch)[0])


def train_step(net: NextWordNet, optimizer: "nnx.Optimizer[Any]", batch: Batch) -> jax.Array:
    """Update the dense layer and the rows of the batch; return the mean loss `[]`."""
    table, ids = net.table.variable, batch["features"]
    rows = embedding_lookup(table, ids)
    find = nnx.value_and_grad(total_loss, argnums=(0, 1))
    total, (grads, row_grads) = find(net, rows, batch)
    size = batch["label"].size
    count, total = reduce_and_update(net, optimizer, grads, size, total)
    steps = row_grads.reshape(-1, row_grads.shape[-1]) * (net.table_learning_rate / count)
    table.scatter_sub(IndexedSlices(steps, ids.reshape(-1)))
    return total / count


def evaluation_step(net: NextWordNet, batch: Batch, mask: jax.Array) -> Batch:
    """Return the sums of the loss and of right answers over the real examples of all replicas."""
    rows = embedding_lookup(net.table.variable, batch["features"])
    losses, logits = row_losses(net, rows, batch)
    return weighted_sums({"loss": losses, "accuracy": logits.argmax(-1) == batch["label"]}, mask)
