"""The job of the rows on parameter servers: the same in every arm, with JAX and without."""

import itertools
from collections.abc import Iterator

import numpy as np

WORKERS = 2
RATE = 0.05
WIDTHS = (784, 512, 512, 256, 128, 10)
# One hundred variables of 20 kB.
MANY, LENGTH = 100, 5000


def make_parameters() -> list[np.ndarray]:
    """Return kernels and biases of 5 layers: 10 arrays, 3.3 MB."""
    rng = np.random.default_rng(0)
    made: list[np.ndarray] = []
    for into, out in itertools.pairwise(WIDTHS):
        made += [rng.normal(0, into**-0.5, (into, out)).astype("float32"), np.zeros(out, "float32")]
    return made


def make_batch(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return images and labels."""
    rng = np.random.default_rng(0)
    images = rng.normal(size=(rows, WIDTHS[0])).astype("float32")
    return images, rng.integers(0, WIDTHS[-1], rows).astype("int32")


def make_batches_of_16() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield one batch for ever. Workers call it by its name, so it has no arguments."""
    yield from itertools.repeat(make_batch(16))


def make_batches_of_256() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield one batch for ever."""
    yield from itertools.repeat(make_batch(256))


BATCHES = {16: make_batches_of_16, 256: make_batches_of_256}
