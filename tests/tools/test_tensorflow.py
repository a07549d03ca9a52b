"""A dataset of tf.data trains as its arrays do."""

import importlib
from typing import Any

from tests.tools.programs import SIZE, X, Y, check_fit

tf: Any = importlib.import_module("tensorflow")


def test_a_dataset_trains_as_its_arrays() -> None:
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(SIZE).prefetch(tf.data.AUTOTUNE)
    check_fit(data)
