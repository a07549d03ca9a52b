"""`batches`: every example once, in an order that depends on seed and epoch alone."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxdist.data import INFINITE_CARDINALITY, batches
from jaxdist.errors import ArgumentError, ArgumentTypeError, ShapeError

# What a training loop that counts its own steps asks for.
_ENDLESS: Any = {"shuffle": True, "seed": 3, "drop_remainder": True, "repeat": None}


def _epochs(data: Any) -> list[int]:
    return [int(i) for batch in data for i in batch]


@given(
    num_examples=st.integers(1, 40),
    batch_size=st.integers(1, 45),
    shuffle=st.booleans(),
    repeat=st.integers(1, 3),
)
def test_each_example_is_given_exactly_once_per_epoch(
    num_examples: int, batch_size: int, shuffle: bool, repeat: int
) -> None:
    data = batches(np.arange(num_examples), batch_size, shuffle=shuffle, repeat=repeat)
    given_ids = np.array(_epochs(data)).reshape(repeat, num_examples)
    for epoch in given_ids:
        assert sorted(epoch) == list(range(num_examples))
    assert data.cardinality == len(data) == repeat * data.batches_per_epoch


@given(num_examples=st.integers(2, 40), first=st.integers(1, 9), second=st.integers(1, 9))
def test_the_order_does_not_depend_on_the_batch_size(
    num_examples: int, first: int, second: int
) -> None:
    x = np.arange(num_examples)
    one = batches(x, first, shuffle=True, seed=3, repeat=2)
    other = batches(x, second, shuffle=True, seed=3, repeat=2)
    assert _epochs(one) == _epochs(other)


def test_the_order_of_a_seed_never_changes() -> None:
    # A saved state is only worth something if tomorrow's order is today's.
    assert _epochs(batches(np.arange(8), 4, shuffle=True, seed=7)) == [6, 3, 4, 0, 2, 7, 5, 1]


def test_each_epoch_has_an_order_of_its_own() -> None:
    data = batches(np.arange(64), 64, shuffle=True, repeat=2)
    first, second = data
    assert first.tolist() != second.tolist()


def test_another_seed_gives_another_order() -> None:
    orders = [_epochs(batches(np.arange(64), 64, shuffle=True, seed=s)) for s in (0, 1)]
    assert orders[0] != orders[1]


def test_a_second_pass_is_the_next_epoch() -> None:
    data = batches(np.arange(16), 4, shuffle=True)
    both = batches(np.arange(16), 4, shuffle=True, repeat=2)
    assert _epochs(data) + _epochs(data) == _epochs(both)


def test_leaves_stay_together_when_shuffled() -> None:
    x = np.arange(20)
    for batch in batches({"x": x, "y": (x * 10, [x[:, None]])}, 6, shuffle=True):
        assert (batch["x"] * 10 == batch["y"][0]).all()
        assert batch["y"][1][0].shape == (len(batch["x"]), 1)


def test_drop_remainder_leaves_out_the_incomplete_batch_of_every_epoch() -> None:
    data = batches(np.arange(10), 4, drop_remainder=True, repeat=2)
    assert [b.tolist() for b in data] == [[0, 1, 2, 3], [4, 5, 6, 7]] * 2
    assert len(data) == 4


def test_a_batch_never_crosses_the_border_of_an_epoch() -> None:
    sizes = [len(b) for b in batches(np.arange(10), 4, repeat=2)]
    assert sizes == [4, 4, 2, 4, 4, 2]


def test_repeat_none_has_no_end_and_no_length() -> None:
    data = batches(np.arange(4), 2, repeat=None)
    stream = iter(data)
    assert [next(stream)[0] for _ in range(5)] == [0, 2, 0, 2, 0]
    assert data.cardinality == INFINITE_CARDINALITY
    with pytest.raises(TypeError, match="no end"):
        len(data)


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_batch_is_a_copy(shuffle: bool) -> None:
    x = np.arange(6)
    first = next(iter(batches(x, 6, shuffle=shuffle)))
    x[:] = -1
    assert sorted(first) == list(range(6))


@given(
    num_examples=st.integers(1, 20),
    batch_size=st.integers(1, 7),
    resumed_size=st.integers(1, 7),
    taken=st.integers(0, 30),
)
def test_resuming_gives_every_example_that_was_not_given(
    num_examples: int, batch_size: int, resumed_size: int, taken: int
) -> None:
    x = np.arange(num_examples)
    stream = iter(batches(x, batch_size, shuffle=True, repeat=3))
    before = [int(i) for _, batch in zip(range(taken), stream, strict=False) for i in batch]
    resumed = iter(batches(x, resumed_size, shuffle=True, repeat=3))
    resumed.set_state(stream.get_state())
    whole = _epochs(batches(x, 1, shuffle=True, repeat=3))
    assert before + _epochs(resumed) == whole


@given(
    num_examples=st.integers(1, 20),
    sizes=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    taken=st.integers(0, 12),
)
def test_resuming_an_endless_pass_gives_the_batches_and_the_state_of_one_that_does_not_stop(
    num_examples: int, sizes: tuple[int, int], taken: int
) -> None:
    def make() -> Any:
        size = min(sizes[0], num_examples)
        return iter(batches(np.arange(num_examples), size, **_ENDLESS))

    uninterrupted, stream, resumed = make(), make(), make()
    before = [next(stream).tolist() for _ in range(taken)]
    resumed.set_state(stream.get_state())
    after = [next(resumed).tolist() for _ in range(sizes[1])]
    assert before + after == [next(uninterrupted).tolist() for _ in range(taken + sizes[1])]
    assert resumed.get_state() == uninterrupted.get_state()


@given(
    num_examples=st.integers(1, 40),
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    taken=st.integers(0, 12),
)
def test_with_drop_remainder_no_example_is_given_twice_in_an_epoch_whatever_size_it_resumes_with(
    num_examples: int, sizes: tuple[int, int], taken: int
) -> None:
    size, resumed_size = (min(s, num_examples) for s in sizes)
    stream = iter(batches(np.arange(num_examples), size, **_ENDLESS))
    resumed = iter(batches(np.arange(num_examples), resumed_size, **_ENDLESS))
    epochs: dict[int, list[int]] = {}
    for _ in range(taken):
        batch = next(stream)
        epochs.setdefault(stream.get_state()["epoch"], []).extend(batch.tolist())
    resumed.set_state(stream.get_state())
    for _ in range(2 * num_examples // resumed_size):
        batch = next(resumed)
        assert len(batch) == resumed_size
        epochs.setdefault(resumed.get_state()["epoch"], []).extend(batch.tolist())
    assert list(epochs) == list(range(len(epochs)))
    for given_ids in epochs.values():
        assert len(given_ids) == len(set(given_ids))


def test_the_pass_after_a_resumed_one_is_the_next_epoch() -> None:
    x = np.arange(8)
    data = batches(x, 4, shuffle=True)
    passes = [_epochs(data) for _ in range(4)]
    original = batches(x, 4, shuffle=True)
    iter(original)
    stream = iter(original)
    next(stream)
    again = batches(x, 4, shuffle=True)
    resumed = iter(again)
    resumed.set_state(stream.get_state())
    assert [_epochs(resumed), _epochs(again)] == [passes[1][4:], passes[2]]


def test_a_state_of_other_data_is_refused_with_both_numbers() -> None:
    state = iter(batches(np.arange(9), 4)).get_state()
    with pytest.raises(ArgumentError, match=r"num_examples=9[^$]*num_examples=8"):
        iter(batches(np.arange(8), 4)).set_state(state)


def test_a_state_of_another_order_is_refused() -> None:
    state = iter(batches(np.arange(8), 4, shuffle=True, seed=1)).get_state()
    with pytest.raises(ArgumentError, match=r"seed=1[^$]*seed=2"):
        iter(batches(np.arange(8), 4, shuffle=True, seed=2)).set_state(state)


@pytest.mark.parametrize("index", [-1, 9, "3", None])
def test_a_damaged_state_is_refused(index: Any) -> None:
    stream = iter(batches(np.arange(8), 4))
    with pytest.raises(ArgumentError, match="damaged"):
        stream.set_state({**stream.get_state(), "index": index})
    with pytest.raises(ArgumentError, match="was given state="):
        stream.set_state(index)


@pytest.mark.parametrize("size", [0, -4])
def test_a_batch_size_below_one_is_refused(size: int) -> None:
    with pytest.raises(ArgumentError, match=f"batch_size={size}"):
        batches(np.zeros(4), size)


@pytest.mark.parametrize("size", [2.0, "4", True])
def test_a_batch_size_that_is_no_int_is_refused(size: Any) -> None:
    with pytest.raises(ArgumentTypeError, match="batch_size"):
        batches(np.zeros(4), size)


def test_repeat_and_seed_out_of_range_are_refused() -> None:
    with pytest.raises(ArgumentError, match="repeat=0"):
        batches(np.zeros(4), 2, repeat=0)
    with pytest.raises(ArgumentError, match="seed=-1"):
        batches(np.zeros(4), 2, seed=-1)


def test_arrays_of_different_lengths_are_listed_with_their_shapes() -> None:
    with pytest.raises(ShapeError, match=r"\['x'\][^$]*\[4, 2\][^$]*\['y'\][^$]*\[5\]"):
        batches({"x": np.zeros((4, 2)), "y": np.zeros(5)}, 2)


def test_a_scalar_among_the_arrays_is_named() -> None:
    with pytest.raises(ShapeError, match=r"Leave arrays\['lr'\] out"):
        batches({"x": np.zeros(4), "lr": 0.1}, 2)


@pytest.mark.parametrize("arrays", [{}, None, np.zeros((0, 3))], ids=["dict", "none", "rows"])
def test_no_examples_at_all_are_refused(arrays: Any) -> None:
    with pytest.raises(ShapeError, match=r"without an array|0 examples"):
        batches(arrays, 2)


def test_dropping_everything_is_refused_with_the_batch_size_that_fits() -> None:
    with pytest.raises(ShapeError, match="at most 3"):
        batches(np.zeros(3), 4, drop_remainder=True)


def test_an_array_of_objects_is_refused_and_does_not_end_the_process() -> None:
    rows = np.array([None, "text"], object)
    with pytest.raises(ArgumentTypeError, match=r"arrays\['x'\]"):
        batches({"x": rows}, 2)


@pytest.mark.parametrize("first", [0, 1, 5])
def test_a_pass_that_begins_with_a_later_epoch_has_its_order(first: int) -> None:
    passes = batches(np.arange(10), 4, shuffle=True, seed=3)
    for _ in range(first):
        list(passes)
    late = batches(np.arange(10), 4, shuffle=True, seed=3, first_epoch=first)
    for _ in range(2):
        for one, other in zip(late, passes, strict=True):
            np.testing.assert_array_equal(one, other)
