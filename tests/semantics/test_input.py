"""Statements of TF_SEMANTICS 2.9 (datasets of a strategy) that have no other test."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest

import jaxdist
from jaxdist import InputContext, InputOptions, InputReplicationMode, PerReplica
from jaxdist.data import INFINITE_CARDINALITY, batches
from jaxdist.errors import ContextError
from tests.semantics.oracle import strategy_of
from tests.strategies.oracle import refused

PER_REPLICA = InputOptions(experimental_replication_mode=InputReplicationMode.PER_REPLICA)
PATIENCE_S = 30


def _each(batch: Any) -> list[Any]:
    values = batch.values if isinstance(batch, PerReplica) else (batch,)
    return [np.asarray(v).tolist() for v in values]


# Splitting


def test_a_batch_that_is_full_may_leave_the_last_replica_without_rows() -> None:
    source = batches(np.arange(10), 4, drop_remainder=True)
    data = strategy_of(3).experimental_distribute_dataset(source)

    assert [_each(b) for b in data] == [[[0, 1], [2, 3], []], [[4, 5], [6, 7], []]]


def test_batches_across_the_border_of_an_epoch_are_split_like_others(
    two: jaxdist.Strategy,
) -> None:
    twice = np.tile(np.arange(5), 2)
    data = two.experimental_distribute_dataset(batches(twice, 4))

    assert [_each(b) for b in data] == [[[0, 1], [2, 3]], [[4, 0], [1, 2]], [[3], [4]]]


def test_vectors_that_are_not_batched_are_split_along_their_own_dim(two: jaxdist.Strategy) -> None:
    vectors = [np.arange(4), np.arange(4, 8), np.arange(8, 12)]

    data = two.experimental_distribute_dataset(vectors)

    assert [_each(b) for b in data] == [
        [[4 * i, 4 * i + 1], [4 * i + 2, 4 * i + 3]] for i in range(3)
    ]


@pytest.mark.parametrize(
    "make", [lambda: strategy_of(1), lambda: jaxdist.OneDeviceStrategy("cpu:1")]
)
def test_scalars_that_are_not_batched_pass_through_with_one_replica(
    make: Callable[[], jaxdist.Strategy],
) -> None:
    found = list(make().experimental_distribute_dataset(range(3)))

    assert [x.shape for x in found] == [()] * 3
    assert [int(x) for x in found] == [0, 1, 2]


@pytest.mark.parametrize(
    ("elements", "steps"),
    [
        (range(3), [[0, 1], [2, 0]]),
        ([np.full(2, i) for i in range(3)], [[[0, 0], [1, 1]], [[2, 2], []]]),
    ],
    ids=["scalars", "batches"],
)
def test_a_last_group_of_static_shapes_that_is_not_full_is_given_all_the_same(
    two: jaxdist.Strategy, elements: Any, steps: list[Any]
) -> None:
    data = two.distribute_datasets_from_function(lambda _: elements)

    assert [_each(b) for b in data] == steps


def test_an_endless_dataset_has_the_same_shapes_in_every_step(two: jaxdist.Strategy) -> None:
    source = batches(np.arange(10), 4, drop_remainder=True, repeat=None)
    data = two.experimental_distribute_dataset(source)

    with iter(data) as iterator:
        assert iterator.element_spec == jax.ShapeDtypeStruct((2,), np.int32)
        shapes = [[v.shape for v in next(iterator).values] for _ in range(7)]

    assert shapes == [[(2,), (2,)]] * 7
    assert data.cardinality == INFINITE_CARDINALITY


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_the_squares_of_all_examples_are_summed_whatever_the_number_of_replicas(
    count: int,
) -> None:
    strategy = strategy_of(count)
    data = strategy.experimental_distribute_dataset(batches({"x": np.arange(10.0)}, 4))

    def step(batch: Any) -> Any:
        return (batch["x"] ** 2).sum()

    sums = [strategy.run(step, (batch,)) for batch in data]

    if count > 1:
        sums = [strategy.reduce("SUM", x, axis=None) for x in sums]
    assert sum(float(x) for x in sums) == 285.0


# Datasets of a function


def test_each_replica_reads_a_pipeline_of_its_own(two: jaxdist.Strategy) -> None:
    seen = []

    def dataset_fn(context: InputContext) -> Any:
        pipeline = context.input_pipeline_id
        seen.append((context.num_input_pipelines, pipeline, context.num_replicas_in_sync))
        return batches(np.arange(3) + 100 * pipeline, 2)

    data = two.distribute_datasets_from_function(dataset_fn, PER_REPLICA)

    assert [_each(b) for b in data] == [[[0, 1], [100, 101]], [[2], [102]]]
    assert seen == [(2, 0, 2), (2, 1, 2)]


def test_one_device_has_no_pipeline_for_each_replica() -> None:
    strategy = jaxdist.OneDeviceStrategy("cpu:0")

    with pytest.raises(NotImplementedError, match="PER_REPLICA"):
        strategy.experimental_distribute_dataset([np.zeros(2)], PER_REPLICA)
    with pytest.raises(NotImplementedError, match="PER_REPLICA"):
        strategy.distribute_datasets_from_function(lambda _: [np.zeros(2)], PER_REPLICA)


# Reading ahead


class Counted:
    """Endless elements, and how many of them were pulled."""

    def __init__(self) -> None:
        self.count = 0
        self._changed = threading.Condition()

    def __iter__(self) -> Iterator[np.ndarray]:
        while True:
            with self._changed:
                self.count += 1
                self._changed.notify_all()
            yield np.zeros(2)

    def wait_for(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.count >= count, PATIENCE_S)


@pytest.mark.parametrize(
    ("options", "pulled"),
    [
        (None, 4),
        (InputOptions(experimental_per_replica_buffer_size=1), 4),
        (InputOptions(experimental_per_replica_buffer_size=4), 10),
        (InputOptions(experimental_per_replica_buffer_size=0), 2),
        (InputOptions(experimental_per_replica_buffer_size=-1), 2),
    ],
    ids=["default", "1", "4", "0", "-1"],
)
def test_the_buffer_size_is_the_number_of_elements_kept_ready_for_each_replica(
    two: jaxdist.Strategy, options: InputOptions | None, pulled: int
) -> None:
    source = Counted()
    data = two.distribute_datasets_from_function(lambda _: source, options)

    with iter(data) as iterator:
        for taken in range(5):
            next(iterator)
            source.wait_for(pulled + 2 * taken)
            assert source.count == pulled + 2 * taken
    # The thread has ended, so this is all that was ever pulled.
    assert source.count == pulled + 8


# Iterating

ASKS: dict[str, Callable[[Any], Any]] = {
    "next": next,
    "get_next": lambda iterator: iterator.get_next(),
    "get_next_as_optional": lambda iterator: iterator.get_next_as_optional(),
    "for": list,
}


@pytest.mark.parametrize("ask", ASKS)
@pytest.mark.both_executors
def test_a_batch_cannot_be_taken_inside_a_step_and_none_is_lost(
    two: jaxdist.Strategy, ask: str
) -> None:
    with iter(two.experimental_distribute_dataset(batches(np.arange(8), 4))) as iterator:
        with refused(ContextError, "inside a replica", "args=(next(iterator),)"):
            two.run(lambda: ASKS[ask](iterator))
        assert [_each(b) for b in iterator] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


@pytest.mark.parametrize("ask", ASKS)
def test_taking_a_batch_inside_a_step_is_a_value_error(two: jaxdist.Strategy, ask: str) -> None:
    with (
        iter(two.experimental_distribute_dataset(batches(np.arange(8), 4))) as iterator,
        pytest.raises(ValueError, match="next"),
    ):
        two.run(lambda: ASKS[ask](iterator))


def test_a_distributed_dataset_can_be_enumerated(two: jaxdist.Strategy) -> None:
    data = two.experimental_distribute_dataset(batches(np.arange(8), 4))

    assert [(i, _each(b)[0]) for i, b in enumerate(data)] == [(0, [0, 1]), (1, [4, 5])]


def test_a_shuffled_dataset_has_another_order_in_each_pass_and_the_same_examples(
    two: jaxdist.Strategy,
) -> None:
    data = two.experimental_distribute_dataset(batches(np.arange(32), 8, shuffle=True))

    first, second = ([i for b in data for v in _each(b) for i in v] for _ in range(2))

    assert first != second
    assert sorted(first) == sorted(second) == list(range(32))


def test_a_dataset_that_is_not_shuffled_is_the_same_in_each_pass(two: jaxdist.Strategy) -> None:
    data = two.experimental_distribute_dataset(batches(np.arange(7), 4))

    passes = [[_each(b) for b in data] for _ in range(3)]

    assert passes == [[[[0, 1], [2, 3]], [[4, 5], [6]]]] * 3
