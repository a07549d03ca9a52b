"""The iterator: its documented methods, and positions that can be saved."""

import json
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdist.data import (
    DistributedIterator,
    InputOptions,
    InputReplicationMode,
    batches,
    distribute_dataset,
    distribute_datasets_from_function,
)
from jaxdist.errors import (
    ArgumentError,
    ArgumentTypeError,
    ContextError,
    JaxdistError,
    OutOfRangeError,
)
from tests.layouts import make_layout
from tests.tables import examples


def _ids(batch: Any) -> list[int]:
    ids: list[int] = np.asarray(batch.array).tolist()
    return ids


def _three_batches(depth: int = 1) -> Any:
    options = InputOptions(experimental_per_replica_buffer_size=depth)
    return distribute_dataset(batches(np.arange(12), 4), make_layout(2), options)


@pytest.mark.parametrize("depth", [-1, 0, 1, 2, 7])
def test_next_gives_every_batch_and_then_stops(depth: int) -> None:
    iterator = iter(_three_batches(depth))
    assert isinstance(iterator, DistributedIterator)
    assert iter(iterator) is iterator
    assert [_ids(b) for b in iterator] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(iterator)


def test_each_iter_begins_anew() -> None:
    data = _three_batches()
    first, second = iter(data), iter(data)
    assert _ids(next(first)) == _ids(next(second)) == [0, 1, 2, 3]
    assert [_ids(next(first)), _ids(next(first)), _ids(next(second))][2] == [4, 5, 6, 7]


@pytest.mark.parametrize("depth", [0, 1])
def test_get_next_at_the_end_raises_out_of_range(depth: int) -> None:
    iterator = iter(_three_batches(depth))
    assert [_ids(iterator.get_next())[0] for _ in range(3)] == [0, 4, 8]
    for _ in range(2):
        with pytest.raises(OutOfRangeError, match="ended after 3 batches") as caught:
            iterator.get_next()
        assert isinstance(caught.value, StopIteration)
        assert isinstance(caught.value, JaxdistError)


@pytest.mark.parametrize("depth", [0, 1])
def test_get_next_as_optional_says_at_the_end_that_there_is_no_value(depth: int) -> None:
    iterator = iter(_three_batches(depth))
    given_ids = []
    while (optional := iterator.get_next_as_optional()).has_value():
        given_ids += _ids(optional.get_value())
    assert given_ids == list(range(12))
    optional = iterator.get_next_as_optional()
    assert not optional.has_value()
    assert repr(optional) == "OptionalBatch(empty)"
    with pytest.raises(ArgumentError, match="has ended"):
        optional.get_value()


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("taken", [0, 1, 3])
def test_element_spec_can_be_asked_at_any_time_and_loses_no_batch(taken: int, depth: int) -> None:
    iterator = iter(_three_batches(depth))
    for _ in range(taken):
        next(iterator)
    if taken == 3:
        with pytest.raises(OutOfRangeError):
            _ = iterator.element_spec
        return
    assert iterator.element_spec == jax.ShapeDtypeStruct((2,), np.int32)
    assert sum(1 for _ in iterator) == 3 - taken
    assert iterator.element_spec == jax.ShapeDtypeStruct((2,), np.int32)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_closed_iterator_says_that_it_is_closed(depth: int) -> None:
    iterator = iter(_three_batches(depth))
    next(iterator)
    iterator.close()
    iterator.close()
    for ask in (iterator.__next__, iterator.get_next, iterator.get_next_as_optional):
        with pytest.raises(ContextError, match=r"close.. was called, after 1 batches"):
            ask()


@pytest.mark.parametrize("depth", [0, 1])
def test_an_iterator_that_is_closed_before_its_first_batch_knows_no_shapes(depth: int) -> None:
    iterator = iter(_three_batches(depth))
    iterator.close()
    with pytest.raises(ContextError, match=r"close.. was called, after 0 batches"):
        _ = iterator.element_spec


def test_leaving_the_iterator_closes_it() -> None:
    with iter(_three_batches()) as iterator:
        next(iterator)
    with pytest.raises(ContextError, match="closed"):
        next(iterator)


# Positions


@settings(deadline=None, max_examples=examples(40))
@given(
    taken=st.integers(0, 9),
    depth=st.integers(0, 3),
    num_replicas=st.sampled_from([1, 2, 4]),
    resumed_on=st.sampled_from([1, 2, 4]),
)
def test_a_resumed_pass_gives_what_was_not_given_whatever_was_read_ahead(
    taken: int, depth: int, num_replicas: int, resumed_on: int
) -> None:
    options = InputOptions(experimental_per_replica_buffer_size=depth)

    def make(replicas: int) -> Any:
        source = batches(np.arange(12), 4, shuffle=True, repeat=3)
        return iter(distribute_dataset(source, make_layout(replicas), options))

    def ids(batch: Any) -> list[int]:
        return [int(i) for i in np.asarray(jax.tree.leaves(batch)[0])]

    with make(1) as uninterrupted, make(num_replicas) as first, make(resumed_on) as second:
        before = [ids(next(first)) for _ in range(taken)]
        second.set_state(json.loads(json.dumps(first.get_state())))
        after = [ids(b) for b in second]
        assert before + after == [ids(b) for b in uninterrupted]


def test_set_state_goes_back_in_an_iterator_that_is_running() -> None:
    iterator = iter(_three_batches(2))
    next(iterator)
    state = iterator.get_state()
    later = [_ids(b) for b in iterator]
    iterator.set_state(state)
    assert [_ids(b) for b in iterator] == later
    iterator.close()
    iterator.set_state(state)
    assert [_ids(b) for b in iterator] == later


def test_epochs_go_on_after_a_resumed_pass() -> None:
    def make() -> Any:
        return distribute_dataset(batches(np.arange(8), 4, shuffle=True), make_layout(2))

    data = make()
    passes = [[_ids(b) for b in data] for _ in range(3)]
    data = make()
    list(data)
    iterator = iter(data)
    next(iterator)
    state = iterator.get_state()
    resumed = make()
    iterator = iter(resumed)
    iterator.set_state(state)
    assert [_ids(b) for b in iterator] == passes[1][1:]
    assert [_ids(b) for b in resumed] == passes[2]


def test_a_position_of_a_function_dataset_counts_elements_of_all_replicas() -> None:
    data = distribute_datasets_from_function(lambda _: batches(np.arange(8), 1), make_layout(2))
    iterator = iter(data)
    next(iterator)
    state = iterator.get_state()
    assert state == {"steps": 1, "source": {**state["source"], "index": 2}}
    iterator.set_state(state)
    assert [_ids(b) for b in iterator] == [[2, 3], [4, 5], [6, 7]]


def test_positions_of_one_dataset_for_each_replica_are_kept_apart() -> None:
    options = InputOptions(experimental_replication_mode=InputReplicationMode.PER_REPLICA)

    def make() -> Any:
        return distribute_datasets_from_function(
            lambda c: batches(np.arange(4) + 10 * c.input_pipeline_id, 1), make_layout(2), options
        )

    iterator = iter(make())
    next(iterator)
    resumed = iter(make())
    resumed.set_state(iterator.get_state())
    assert [_ids(b) for b in resumed] == [_ids(b) for b in iterator] == [[1, 11], [2, 12], [3, 13]]


def test_a_dataset_without_positions_says_what_it_lacks() -> None:
    def source() -> Iterator[np.ndarray]:
        yield from (np.zeros(2), np.ones(2))

    iterator = iter(distribute_dataset(source, make_layout(2)))
    with pytest.raises(ArgumentTypeError, match="no get_state"):
        iterator.get_state()
    with pytest.raises(ArgumentTypeError, match="no set_state"):
        iterator.set_state({"steps": 0, "source": None})
    assert len(list(iterator)) == 2


@pytest.mark.parametrize(
    "state",
    [
        None,
        {},
        {"steps": 1},
        3,
        {"steps": -1, "source": None},
        {"steps": True, "source": None},
        {"steps": "1", "source": None},
        {"steps": 1, "source": None, "padded_rows": 0.5},
        {"steps": 1, "source": None, "more": 1},
    ],
)
def test_what_is_no_state_is_refused_and_changes_nothing(state: Any) -> None:
    iterator = iter(_three_batches())
    next(iterator)
    with pytest.raises(ArgumentError, match="was given state="):
        iterator.set_state(state)
    assert _ids(next(iterator)) == [4, 5, 6, 7]


def test_a_state_of_another_dataset_is_refused_and_changes_nothing() -> None:
    other = iter(distribute_dataset(batches(np.arange(20), 4), make_layout(2))).get_state()
    iterator = iter(_three_batches(2))
    next(iterator)
    with pytest.raises(ArgumentError, match=r"num_examples=20[^$]*num_examples=12"):
        iterator.set_state(other)
    assert _ids(next(iterator)) == [4, 5, 6, 7]
