"""The digits task: 1,797 images, and the words for its results."""

import dataclasses
from typing import Any, final

import numpy as np

from jaxdist.jobs._task import Curve, Measures, Task
from jaxdist.jobs.digits._recipe import IMAGE_SHAPE, DigitsRecipe
from jaxdist.jobs.digits._schema import DigitsConfig
from jaxdist.training import WEIGHT, require_extra

_BRIGHTEST = 16.0  # pixels are 0 to 16, sklearn.datasets.load_digits


@dataclasses.dataclass(frozen=True)
class Digits:
    """Images `[n, 8, 8, 1]` from 0 to 1, and labels `[n]`; for training, and held out."""

    train: dict[str, np.ndarray]
    test: dict[str, np.ndarray]


def load_digits(test_fraction: float, seed: int) -> Digits:
    """Load the digits and hold some out. The choice depends on `seed` only.

    Raises:
        MissingExtraError: scikit-learn is not installed.
    """
    require_extra("scikit-learn", "load the handwritten digits")
    from sklearn import datasets

    pixels, labels = map(np.asarray, datasets.load_digits(return_X_y=True))
    images = (pixels / _BRIGHTEST).astype(np.float32).reshape(-1, *IMAGE_SHAPE)
    order = np.random.default_rng(seed).permutation(len(labels))
    # At least one example on each side, also for an extreme fraction.
    held_out = min(max(1, round(len(labels) * test_fraction)), len(labels) - 1)
    return Digits(
        train=_select_rows(images, labels, order[held_out:]),
        test=_select_rows(images, labels, order[:held_out]),
    )


def _select_rows(images: np.ndarray, labels: np.ndarray, rows: np.ndarray) -> dict[str, np.ndarray]:
    return {"image": images[rows], "label": labels[rows].astype(np.int32)}


@final
class DigitsTask(Task):
    """The task of the handwritten digits.

    Raises:
        MissingExtraError: scikit-learn is not installed.
    """

    title = "digits"
    examples = "images"
    unit = "images"
    curve = Curve("accuracy", "held-out accuracy (%)", factor=100.0)

    def __init__(self, config: DigitsConfig) -> None:
        self.recipe = DigitsRecipe(config)
        self._data = config.data
        digits = load_digits(config.data.test_fraction, config.data.seed)
        self.train, self.held_out = digits.train, digits.test
        self.units_per_example = 1

    def identity(self) -> dict[str, Any]:
        return {"seed": self._data.seed, "test_fraction": self._data.test_fraction}

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
