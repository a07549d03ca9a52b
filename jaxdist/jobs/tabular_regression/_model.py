"""A net for rows of numbers, some of which are missing, and its steps."""

import dataclasses
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from flax import nnx
from msgspec import Meta

from jaxdist.jobs import entry
from jaxdist.training import reduce_and_update, weighted_sums

Batch = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The units of the hidden layer. 0 units is linear regression."""

    hidden: Annotated[int, Meta(ge=0, le=65536)] = entry(64, change="never")


class Regressor(nnx.Module):
    """A prediction for each row, from its features and flags that say which of them are known.

    Example:
        >>> net = Regressor(6, ModelConfig(hidden=4), rngs=nnx.Rngs(0))
        >>> net(jnp.zeros((5, 6))).shape
        (5,)
    """

    def __init__(self, columns: int, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        width = config.hidden or columns
        self.hidden = nnx.Linear(columns, width, rngs=rngs) if config.hidden else None
        self.out = nnx.Linear(width, 1, rngs=rngs)

    def __call__(self, features: jax.Array) -> jax.Array:
        x = features if self.hidden is None else nnx.relu(self.hidden(features))
        return self.out(x)[:, 0]


def squared_errors(net: Regressor, batch: Batch) -> jax.Array:
    """Return the squared error of each row `[b]`; 0 for rows without a known target."""
    errors = net(batch["features"]) - batch["target"]
    return jnp.where(batch["is_known"], errors * errors, 0.0)


def total_loss(net: Regressor, batch: Batch) -> jax.Array:
    """Return the sum of the squared errors over the rows of this replica."""
    return jnp.sum(squared_errors(net, batch))


def train_step(net: Regressor, optimizer: "nnx.Optimizer[Any]", batch: Batch) -> jax.Array:
    """Update the net in place, and return the mean loss over the known targets `[]`."""
    total, grads = nnx.value_and_grad(total_loss)(net, batch)
    known = jnp.sum(batch["is_known"])
    count, total = reduce_and_update(net, optimizer, grads, known, total)
    return total / count


def evaluation_step(net: Regressor, batch: Batch, mask: jax.Array) -> Batch:
    """Return the sums over the known targets of all replicas, and those of their moments."""
    target = batch["target"]
    rows = {"loss": squared_errors(net, batch), "target": target, "square": target * target}
    return weighted_sums(rows, mask * batch["is_known"])
