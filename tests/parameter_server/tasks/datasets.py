"""Dataset functions of a module."""

import itertools
from collections.abc import Iterator

import numpy as np


def count_up() -> Iterator[np.float32]:
    """Return 0, 1, 2 and so on."""
    return (np.float32(n) for n in itertools.count())


def count_to_three() -> Iterator[np.float32]:
    """Return three numbers."""
    return (np.float32(n) for n in range(3))
