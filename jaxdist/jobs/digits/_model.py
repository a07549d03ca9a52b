"""A convolutional net for 8x8 images, and its steps."""

import dataclasses
import itertools
import math
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from msgspec import Meta

from jaxdist.jobs import entry
from jaxdist.training import reduce_and_update, weighted_sums

Batch = dict[str, jax.Array]

NUM_CLASSES = 10
IMAGE_SHAPE = (8, 8, 1)


_Channels = Annotated[int, Meta(ge=1, le=4096)]


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The channels of each convolution, and the units of the second-to-last layer."""

    # Each convolution is followed by 2x2 pooling, and 8x8 images can be halved three times.
    channels: Annotated[tuple[_Channels, ...], Meta(min_length=1, max_length=3)] = entry(
        (16, 32), change="never"
    )
    hidden: Annotated[int, Meta(ge=1, le=65536)] = entry(64, change="never")


class DigitsNet(nnx.Module):
    """3x3 convolutions with 2x2 pooling after each, then two dense layers.

    Has neither BatchNorm nor dropout: every number of replicas computes the same function.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        widths = [1, *config.channels]
        self.convolutions = nnx.List(
            nnx.Conv(i, o, kernel_size=(3, 3), rngs=rngs) for i, o in itertools.pairwise(widths)
        )
        side = 8 >> len(config.channels)
        self.hidden = nnx.Linear(side * side * widths[-1], config.hidden, rngs=rngs)
        self.logits = nnx.Linear(config.hidden, NUM_CLASSES, rngs=rngs)

    def __call__(self, image: jax.Array) -> jax.Array:
        x = image  # [row, 8, 8, 1]
        for convolution in self.convolutions:
            x = nnx.max_pool(nnx.relu(convolution(x)), (2, 2), strides=(2, 2))
        # Not -1: a replica may have no rows, and JAX cannot infer a dim of an empty array.
        x = x.reshape(x.shape[0], math.prod(x.shape[1:]))
        return self.logits(nnx.relu(self.hidden(x)))  # [row, class]


def row_losses(net: DigitsNet, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Return the cross-entropy of each row `[b]`, and the logits `[b, class]`."""
    logits = net(batch["image"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]), logits


def total_loss(net: DigitsNet, batch: Batch) -> jax.Array:
    """Return the sum of the cross-entropy over the rows of this replica."""
    return jnp.sum(row_losses(net, batch)[0])


# Steps, inside a replica


def train_step(net: DigitsNet, optimizer: "nnx.Optimizer[Any]", batch: Batch) -> jax.Array:
    """Update the net in place, and return the mean loss over the global batch `[]`."""
    total, grads = nnx.value_and_grad(total_loss)(net, batch)
    size = batch["label"].size
    count, total = reduce_and_update(net, optimizer, grads, size, total)
    return total / count


def evaluation_step(net: DigitsNet, batch: Batch, mask: jax.Array) -> Batch:
    """Return the sums of the loss and of right answers over the real rows of all replicas."""
    losses, logits = row_losses(net, batch)
    right = logits.argmax(-1) == batch["label"]
    return weighted_sums({"loss": losses, "accuracy": right}, mask)
