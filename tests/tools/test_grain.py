"""A dataset of Grain trains as its arrays do; `repeat` gives each epoch its own order."""

import importlib
from typing import Any

import numpy as np

from tests.tools.programs import SIZE, X, Y, check_fit, read_passes

grain: Any = importlib.import_module("grain")


def test_a_map_dataset_trains_as_its_arrays() -> None:
    check_fit(grain.MapDataset.source(list(zip(X, Y, strict=True))).batch(SIZE))


def test_only_with_repeat_passes_have_an_order_each() -> None:
    source = grain.MapDataset.source(list(np.arange(16))).shuffle(seed=0)
    first, second = read_passes(source.batch(SIZE), 2)
    assert first == second
    first, second = read_passes(source.repeat().batch(SIZE), 2)
    assert first != second
    assert sorted(first) == sorted(second) == list(range(16))
