"""Batches: every row as often as promised, and the same after a resume."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxdist.errors import ArgumentError, ShapeError
from jaxdist.training import Position, ShuffledBatches, padded_batches

_SIZES = st.tuples(st.integers(1, 40), st.integers(1, 40)).filter(lambda s: s[1] <= s[0])


def _ids(batches: ShuffledBatches) -> list[list[int]]:
    return [b["id"].tolist() for b in batches]


def _batches(rows: int, size: int, count: int, start: Position = Position()) -> ShuffledBatches:  # noqa: B008
    data = {"id": np.arange(rows)}
    return ShuffledBatches(data, batch_size=size, seed=3, num_batches=count, start=start)


@given(_SIZES, st.integers(0, 12), st.integers(0, 12))
def test_a_run_that_starts_at_a_saved_position_sees_what_the_whole_one_would_have(
    sizes: tuple[int, int], before: int, after: int
) -> None:
    whole = _batches(*sizes, before + after)
    resumed = _batches(*sizes, after, whole.position_after(before))
    assert _ids(whole)[before:] == _ids(resumed)
    assert resumed.position_after(after) == whole.position_after(before + after)


@given(_SIZES)
def test_no_row_is_seen_twice_in_an_epoch(sizes: tuple[int, int]) -> None:
    rows, size = sizes
    per_epoch = rows // size
    seen = [i for batch in _ids(_batches(rows, size, per_epoch)) for i in batch]
    assert len(seen) == len(set(seen)) == per_epoch * size


def test_epochs_differ_in_order_and_iterating_twice_gives_the_same() -> None:
    batches = _batches(64, 64, 2)
    first, second = _ids(batches)
    assert first != second
    assert sorted(first) == sorted(second)
    assert _ids(batches) == [first, second]
    assert len(batches) == 2


def test_rows_of_all_arrays_stay_together() -> None:
    data = {"x": np.arange(20), "y": np.arange(20) * 10}
    for batch in ShuffledBatches(data, batch_size=4, seed=0, num_batches=5):
        np.testing.assert_array_equal(batch["x"] * 10, batch["y"])


@given(_SIZES, st.integers(1, 40), st.integers(0, 5))
def test_another_batch_size_after_a_resume_never_repeats_a_row_of_the_epoch(
    sizes: tuple[int, int], size: int, done: int
) -> None:
    rows, first_size = sizes
    position = _batches(rows, first_size, 0).position_after(done)
    size = min(size, rows)
    resumed = _batches(rows, size, 1 + rows // size, position)
    before = _ids(_batches(rows, first_size, done))[-(position.row // first_size) :]
    seen = [i for b in before for i in b] if position.row else []
    for n, batch in enumerate(_ids(resumed)):
        if resumed.position_after(n).epoch == position.epoch:
            seen += batch
    assert max(Counter(seen).values(), default=0) <= 1


def test_a_batch_larger_than_the_data_or_not_positive_is_refused() -> None:
    with pytest.raises(ShapeError, match=r"batch of 9 rows: the data has 8(.|\n)*batch_size=8"):
        _batches(8, 9, 1)
    with pytest.raises(ArgumentError, match="from 1 to 8"):
        _batches(8, 0, 1)


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
