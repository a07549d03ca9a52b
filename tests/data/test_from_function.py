"""Datasets made by a function: one element for each replica."""

from typing import Any

import jax
import numpy as np
import pytest

from jaxdist import PerReplica
from jaxdist.data import (
    InputContext,
    InputOptions,
    InputReplicationMode,
    PartialBatch,
    batches,
    distribute_datasets_from_function,
)
from jaxdist.errors import ArgumentTypeError, ContextError, ShapeError
from tests.layouts import make_layout

ERROR = InputOptions(partial_batch=PartialBatch.ERROR)
PER_REPLICA = InputOptions(experimental_replication_mode=InputReplicationMode.PER_REPLICA)


def _locals(batch: Any) -> list[Any]:
    values = batch.values if isinstance(batch, PerReplica) else (batch,)
    return [np.asarray(v).tolist() for v in values]


def test_the_function_is_called_once_and_not_again_when_iterating() -> None:
    contexts: list[InputContext] = []

    def dataset_fn(context: InputContext) -> Any:
        contexts.append(context)
        return [np.zeros(2)] * 4

    data = distribute_datasets_from_function(dataset_fn, make_layout(4))
    assert len(contexts) == 1
    assert [len(list(data)), len(list(data))] == [1, 1]
    (context,) = contexts
    assert (context.num_input_pipelines, context.input_pipeline_id) == (1, 0)
    assert context.num_replicas_in_sync == 4


def test_consecutive_elements_go_to_consecutive_replicas() -> None:
    data = distribute_datasets_from_function(lambda _: batches(np.arange(8), 2), make_layout(2))
    assert [_locals(b) for b in data] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


def test_scalar_elements_become_one_scalar_for_each_replica() -> None:
    data = distribute_datasets_from_function(lambda _: range(10), make_layout(2))
    assert [_locals(b) for b in data] == [[i, i + 1] for i in range(0, 10, 2)]
    assert data.element_spec == jax.ShapeDtypeStruct((), np.int32)


def test_one_replica_gets_each_element_as_it_is() -> None:
    data = distribute_datasets_from_function(lambda _: [np.arange(3), np.arange(2)], make_layout(1))
    first, second = data
    assert isinstance(first, jax.Array)
    assert [first.tolist(), second.tolist()] == [[0, 1, 2], [0, 1]]


def test_element_spec_is_the_element() -> None:
    data = distribute_datasets_from_function(
        lambda _: [{"x": np.zeros((3, 5), np.float32)}] * 4, make_layout(4)
    )
    assert data.element_spec == {"x": jax.ShapeDtypeStruct((3, 5), np.float32)}


def test_cardinality_counts_steps() -> None:
    data = distribute_datasets_from_function(lambda _: batches(np.arange(16), 2), make_layout(4))
    assert data.cardinality == 2


def test_a_last_step_that_cannot_be_filled_says_how_many_are_missing() -> None:
    data = distribute_datasets_from_function(
        lambda _: batches(np.arange(7), 1), make_layout(4), ERROR
    )
    iterator = iter(data)
    assert _locals(next(iterator)) == [[0], [1], [2], [3]]
    with pytest.raises(ShapeError) as caught:
        next(iterator)
    for part in (
        "step 1",
        "7 elements",
        "3 are left for 4 replicas",
        "1 are missing",
        "drop the last 3 to get 4",
        "add 1 more",
        "partial_batch=UNEVEN or PAD",
    ):
        assert part in str(caught.value)


def test_too_few_elements_for_the_first_step_are_not_told_to_drop_all() -> None:
    with pytest.raises(ShapeError, match="Add 3 more"):
        list(distribute_datasets_from_function(lambda _: range(1), make_layout(4), ERROR))


def test_shapes_that_differ_in_one_step_name_the_leaf_and_both_shapes() -> None:
    elements = [{"x": np.zeros((2, 3), np.float32), "y": np.zeros(2)}] * 3
    elements += [{"x": np.zeros((2, 4), np.float32), "y": np.zeros(2)}]
    data = distribute_datasets_from_function(lambda _: elements, make_layout(2), ERROR)
    with pytest.raises(
        ShapeError,
        match=r"step 1[^$]*batch\['x'\] is float32\[2, 3\] for replica 0 and float32\[2, 4\] "
        r"for replica 1",
    ) as caught:
        list(data)
    assert "batch['y']" not in str(caught.value)


def test_a_structure_that_changes_names_the_element() -> None:
    elements = [{"x": np.zeros(2)}] * 3 + [{"y": np.zeros(2)}]
    with pytest.raises(ShapeError, match="element 3"):
        list(distribute_datasets_from_function(lambda _: elements, make_layout(2)))


def test_per_replica_mode_calls_the_function_for_each_replica() -> None:
    contexts: list[InputContext] = []

    def dataset_fn(context: InputContext) -> Any:
        contexts.append(context)
        return batches(np.arange(4) + 100 * context.input_pipeline_id, 2)

    data = distribute_datasets_from_function(dataset_fn, make_layout(2), PER_REPLICA)
    assert [_locals(b) for b in data] == [[[0, 1], [100, 101]], [[2, 3], [102, 103]]]
    assert [(c.num_input_pipelines, c.input_pipeline_id) for c in contexts] == [(2, 0), (2, 1)]
    assert [c.num_replicas_in_sync for c in contexts] == [2, 2]
    assert data.cardinality == 2


def test_per_replica_datasets_of_different_lengths_name_the_replicas_that_ended() -> None:
    def dataset_fn(context: InputContext) -> Any:
        return [np.zeros(1)] * (3 if context.input_pipeline_id == 1 else 2)

    options = PER_REPLICA._replace(partial_batch=PartialBatch.ERROR)
    data = iter(distribute_datasets_from_function(dataset_fn, make_layout(3), options))
    next(data)
    next(data)
    with pytest.raises(ShapeError, match=r"step 2[^$]*replicas \[0, 2\] have ended"):
        next(data)


def test_a_function_that_returns_no_dataset_is_refused_at_once() -> None:
    with pytest.raises(
        ArgumentTypeError, match="distribute_datasets_from_function was given dataset_fn"
    ):
        distribute_datasets_from_function(lambda _: 3, make_layout(2))


def test_a_dataset_in_the_place_of_the_function_is_refused() -> None:
    wrong: Any = [np.zeros(2)]
    with pytest.raises(ArgumentTypeError, match="is a function"):
        distribute_datasets_from_function(wrong, make_layout(2))


def test_a_generator_of_the_function_allows_one_pass() -> None:
    data = distribute_datasets_from_function(
        lambda _: (np.zeros(1) for _ in range(4)), make_layout(2)
    )
    assert len(list(data)) == 2
    with pytest.raises(ContextError, match="only once"):
        iter(data)
