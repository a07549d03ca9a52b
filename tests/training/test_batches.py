"""Batches for evaluation: one shape, and every row counts once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxdist.errors import ShapeError
from jaxdist.training import padded_batches


def test_arrays_with_different_rows_are_named() -> None:
    with pytest.raises(ShapeError, match=r"'x': 3, 'y': 4"):
        list(padded_batches({"x": np.arange(3), "y": np.arange(4)}, 2))


@given(st.integers(1, 50), st.integers(1, 20))
def test_padded_batches_have_one_shape_and_weigh_every_row_once(rows: int, size: int) -> None:
    data = {"id": np.arange(rows), "image": np.ones((rows, 2, 3), np.float32)}
    batches = list(padded_batches(data, size))
    assert {b["image"].shape for b in batches} == {(size, 2, 3)}
    ids = np.concatenate([b["id"] for b in batches])
    weights = np.concatenate([b["weight"] for b in batches])
    assert ids[weights == 1].tolist() == list(range(rows))
    assert weights.sum() == rows
    assert set(weights.tolist()) <= {0.0, 1.0}
