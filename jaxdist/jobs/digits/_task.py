"""The digits task: 1,797 images, and how to describe its results."""

import dataclasses
from collections.abc import Mapping
from typing import Literal, final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxdist.jobs import Curve, Data, JobConfig, Task, section, split_rows
from jaxdist.jobs.digits._model import (
    IMAGE_SHAPE,
    DigitsNet,
    ModelConfig,
    evaluation_step,
    train_step,
)
from jaxdist.training import WEIGHT, require_extra

_BRIGHTEST = 16.0  # pixels are 0 to 16, sklearn.datasets.load_digits


@dataclasses.dataclass(frozen=True)
class DigitsConfig(JobConfig):
    """The sections of `configs/digits_mirrored.toml`."""

    task: Literal["digits"] = "digits"
    model: ModelConfig = section(ModelConfig)


def load_digits(test_fraction: float, seed: int) -> Data:
    """Load the digits and hold some out. The choice depends on `seed` only.

    Raises:
        MissingExtraError: scikit-learn is not installed.
    """
    require_extra("scikit-learn", "load the handwritten digits")
    from sklearn import datasets

    pixels, labels = map(np.asarray, datasets.load_digits(return_X_y=True))
    images = (pixels / _BRIGHTEST).astype(np.float32).reshape(-1, *IMAGE_SHAPE)
    examples = {"image": images, "label": labels.astype(np.int32)}
    identity = {"seed": seed, "test_fraction": test_fraction}
    return Data(*split_rows(examples, test_fraction, seed), identity)


@final
class DigitsTask(Task[DigitsConfig]):
    """The task of the handwritten digits.

    Example:
        >>> from jaxdist.jobs import DigitsConfig
        >>> task = DigitsTask(DigitsConfig())
        >>> task.rows_per_replica, task.batch(16)["label"].shape
        (8, (16,))
    """

    config_type = DigitsConfig
    title = "digits"
    examples = "images"
    unit = "images"
    curve = Curve("accuracy", "held-out accuracy (%)", factor=100.0)
    in_words = "held-out accuracy {accuracy:.2%}, loss {loss:.4f} on {images:.0f} images"
    headline = "accuracy {accuracy:.2%}"
    train_step = staticmethod(train_step)
    evaluation_step = staticmethod(evaluation_step)

    def make_model(self, rngs: nnx.Rngs) -> DigitsNet:
        return DigitsNet(self.config.model, rngs=rngs)

    def batch(self, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        return {
            "image": jax.ShapeDtypeStruct((rows, *IMAGE_SHAPE), jnp.float32),
            "label": jax.ShapeDtypeStruct((rows,), jnp.int32),
        }

    def load(self) -> Data:
        return load_digits(self.config.data.test_fraction, self.config.data.seed)

    def measures(self, means: Mapping[str, float]) -> dict[str, float]:
        return {
            "loss": means["loss"],
            "accuracy": means["accuracy"],
            "images": means[WEIGHT],
        }
