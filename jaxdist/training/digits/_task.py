"""Handwritten digits: 1,797 images, a convolutional net, and its steps."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxdist.training._evaluate import WEIGHT, weighted_sums
from jaxdist.training._extras import require_extra
from jaxdist.training._optimizer import reduced_update
from jaxdist.training._task import Curve, Measures, Task
from jaxdist.training.digits._schema import DigitsConfig, ModelConfig

Batch = dict[str, jax.Array]

NUM_CLASSES = 10
IMAGE_SHAPE = (8, 8, 1)
_BRIGHTEST = 16.0  # pixels are 0 to 16, sklearn.datasets.load_digits


@dataclasses.dataclass(frozen=True)
class Digits:
    """Images `[n, 8, 8, 1]` in 0 to 1 and labels `[n]`, for training and held out."""

    train: dict[str, np.ndarray]
    test: dict[str, np.ndarray]


def load_digits(test_fraction: float, seed: int) -> Digits:
    """Load the digits and hold some out; which ones depends on `seed` only.

    Raises:
        MissingExtraError: scikit-learn is not installed.
    """
    require_extra("scikit-learn", "load the handwritten digits")
    from sklearn import datasets

    pixels, labels = map(np.asarray, datasets.load_digits(return_X_y=True))
    images = (pixels / _BRIGHTEST).astype(np.float32).reshape(-1, *IMAGE_SHAPE)
    order = np.random.default_rng(seed).permutation(len(labels))
    held_out = min(max(1, round(len(labels) * test_fraction)), len(labels) - 1)
    return Digits(
        train=_rows(images, labels, order[held_out:]), test=_rows(images, labels, order[:held_out])
    )


def _rows(images: np.ndarray, labels: np.ndarray, rows: np.ndarray) -> dict[str, np.ndarray]:
    return {"image": images[rows], "label": labels[rows].astype(np.int32)}


class DigitsNet(nnx.Module):
    """3x3 convolutions with 2x2 pooling after each, then two dense layers.

    It has neither BatchNorm nor dropout: every replica count computes the same function.
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
        x = x.reshape(x.shape[0], -1)
        return self.logits(nnx.relu(self.hidden(x)))  # [row, class]


def row_losses(net: DigitsNet, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Cross-entropy of each row `[b]`, and the logits `[b, class]`."""
    logits = net(batch["image"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]), logits


def mean_loss(net: DigitsNet, batch: Batch) -> jax.Array:
    """Mean cross-entropy over the rows of this replica."""
    return jnp.mean(row_losses(net, batch)[0])


# Steps, as one replica sees them


def train_step(net: DigitsNet, optimizer: "nnx.Optimizer[Any]", batch: Batch) -> jax.Array:
    """Update the net in place; the mean loss over the global batch `[]`."""
    loss, grads = nnx.value_and_grad(mean_loss)(net, batch)
    return reduced_update(net, optimizer, loss, grads)


def evaluation_step(net: DigitsNet, batch: Batch, mask: jax.Array) -> Batch:
    """Sums of loss and of right answers over the rows that are real, of all replicas."""
    losses, logits = row_losses(net, batch)
    right = logits.argmax(-1) == batch["label"]
    return weighted_sums({"loss": losses, "accuracy": right}, mask)


@final
class DigitsTask(Task):
    """The digits, as a task.

    Raises:
        MissingExtraError: scikit-learn is not installed.
    """

    title = "digits"
    examples = "images"
    unit = "images"
    curve = Curve("accuracy", "held-out accuracy (%)", factor=100.0)

    def __init__(self, config: DigitsConfig) -> None:
        self._config = config
        digits = load_digits(config.data.test_fraction, config.data.seed)
        self.train, self.held_out = digits.train, digits.test
        self.units_per_example = 1

    def identity(self) -> dict[str, Any]:
        return {
            "seed": self._config.data.seed,
            "test_fraction": self._config.data.test_fraction,
        }

    def make_model(self, rngs: nnx.Rngs) -> DigitsNet:
        return DigitsNet(self._config.model, rngs=rngs)

    @property
    def train_step(self) -> Callable[[Any, Any, Any], Any]:
        return train_step

    @property
    def evaluation_step(self) -> Callable[[Any, Any, Any], Any]:
        return evaluation_step

    def measures(self, means: Measures) -> dict[str, float]:
        return {
            "loss": means["loss"],
            "accuracy": means["accuracy"],
            "images": means[WEIGHT],
        }

    def in_words(self, measures: Measures) -> str:
        return (
            f"held-out accuracy {measures['accuracy']:.2%}, loss {measures['loss']:.4f} "
            f"on {measures['images']:.0f} images"
        )

    def headline(self, measures: Measures) -> str:
        return f"accuracy {measures['accuracy']:.2%}"

    def metrics(self, measures: Measures) -> dict[str, Any]:
        return {"accuracy": measures["accuracy"]}
