"""The text of the language model: held-out text is unseen, and each byte counts once."""

import itertools
import math
from pydoc_data.topics import topics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxdist.jobs.topics_lm._text import (
    SEPARATOR,
    Text,
    compute_baselines,
    load_text,
    make_held_out_windows,
    make_training_windows,
)

_BYTES = st.binary(min_size=2, max_size=300).map(lambda b: np.frombuffer(b, np.uint8))


def test_a_text_that_is_too_short_for_a_window_has_none() -> None:
    text = np.zeros(5, np.uint8)
    assert make_training_windows(text, 5, 1)["tokens"].shape == (0, 6)
    assert make_training_windows(text, 4, 1)["tokens"].shape == (1, 5)


@pytest.mark.parametrize(("fraction", "seed"), [(0.1, 0), (0.1, 3), (0.5, 1), (1e-9, 0)])
def test_no_paragraph_that_is_held_out_is_trained_on(fraction: float, seed: int) -> None:
    text = load_text(fraction, seed)
    held_out = [t for t in text.held_out.tobytes().split(SEPARATOR) if t]
    train = [t for t in text.train.tobytes().split(SEPARATOR) if t]
    originals = {t.encode() for t in topics.values()}
    assert set(held_out) <= originals
    kept, held = ({p.strip() for t in ts for p in t.split(b"\n\n")} for ts in (train, held_out))
    assert kept & held <= {b""}
    every = {p.strip() for t in originals for p in t.split(b"\n\n")}
    assert kept | held | {b""} == every | {b""}


def test_as_much_is_held_out_as_was_asked_for_and_a_seed_gives_the_same_again() -> None:
    total = sum(len(t.encode()) for t in topics.values())
    text, again, other = load_text(0.1, 0), load_text(0.1, 0), load_text(0.1, 1)
    assert 0.07 * total < len(text.held_out) <= 0.1 * total + len(topics) + 1
    assert again.checksum == text.checksum != other.checksum
    # Something is held out, and something is left, whatever is asked for.
    assert len(load_text(1e-9, 0).held_out) > 100
    assert len(load_text(0.999, 0).train) > 10


@given(_BYTES, st.integers(1, 40))
def test_each_held_out_byte_but_the_first_is_predicted_once(text: np.ndarray, length: int) -> None:
    windows = make_held_out_windows(text, length)
    targets = [w[1 : n + 1] for w, n in zip(windows["tokens"], windows["length"], strict=True)]
    np.testing.assert_array_equal(np.concatenate(targets), text[1:])
    before = [w[:n] for w, n in zip(windows["tokens"], windows["length"], strict=True)]
    np.testing.assert_array_equal(np.concatenate(before), text[:-1])


@given(_BYTES, st.data())
def test_training_windows_start_a_stride_apart(text: np.ndarray, data: st.DataObject) -> None:
    length = data.draw(st.integers(1, len(text) - 1))
    stride = data.draw(st.integers(1, len(text)))
    windows = make_training_windows(text, length, stride)["tokens"]
    starts = range(0, len(text) - length, stride)
    np.testing.assert_array_equal(windows, [text[i : i + length + 1] for i in starts])


@given(_BYTES, _BYTES)
def test_baselines_are_those_of_counting_one_by_one(train: np.ndarray, test: np.ndarray) -> None:
    single = [1 + sum(int(b) == v for b in train) for v in range(256)]
    alone = [n / sum(single) for n in single]
    unigram = sum(-math.log2(alone[b]) for b in test[1:]) / (len(test) - 1)
    bigram = 0.0
    for a, b in itertools.pairwise(test):
        followed = [int(y) for x, y in itertools.pairwise(train) if x == a]
        bigram -= math.log2((followed.count(int(b)) + 256 * alone[b]) / (len(followed) + 256))
    found = compute_baselines(Text(train, test))
    assert found["unigram"] == pytest.approx(unigram)
    assert found["bigram"] == pytest.approx(bigram / (len(test) - 1))
