"""Frames, columns and categories of pandas train as their arrays do."""

import importlib
from typing import Any

import numpy as np

from tests.tools.programs import SIZE, X, Y, check_fit

pandas: Any = importlib.import_module("pandas")


def test_a_frame_trains_as_its_arrays() -> None:
    frame = pandas.DataFrame(X, columns=list("abcd"))
    frame["kind"] = np.array(["a", "b", "c"])[Y]
    codes = frame.kind.astype("category").cat.codes
    check_fit(frame[list("abcd")], codes, batch_size=SIZE, shuffle=False)
