"""What a distributed dataset and its iterator do, on every strategy and for both ways to make one.

The default strategy is one of them: TensorFlow gives its dataset back as it is.
"""

from collections.abc import Callable, Iterator
from typing import Any

import grain
import jax
import numpy as np
import pytest

import jaxdist
from jaxdist import DistributedDataset, DistributedIterator, InputOptions, PartialBatch
from jaxdist.data import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY, batches
from jaxdist.errors import ArgumentTypeError, ContextError, OutOfRangeError
from tests.strategies.oracle import of_this_process
from tests.strategies_under_test import Row

NUM_STEPS = 3
Way = Callable[[jaxdist.Strategy, list[np.ndarray]], Any]


def _split(strategy: jaxdist.Strategy, steps: list[np.ndarray]) -> Any:
    return strategy.experimental_distribute_dataset(steps)


def _from_function(strategy: jaxdist.Strategy, steps: list[np.ndarray]) -> Any:
    def dataset_fn(context: jaxdist.InputContext) -> list[np.ndarray]:
        pipelines = (context.num_input_pipelines, context.input_pipeline_id)
        assert pipelines == (jax.process_count(), jax.process_index())
        assert context.num_replicas_in_sync == strategy.num_replicas_in_sync
        parts = [np.split(x, context.num_replicas_in_sync) for x in steps]
        return [rows for x in parts for rows in of_this_process(strategy, x)]

    return strategy.distribute_datasets_from_function(dataset_fn)


WAYS = pytest.mark.parametrize("way", [_split, _from_function], ids=["split", "function"])


def _steps(strategy: jaxdist.Strategy) -> list[np.ndarray]:
    size = 2 * strategy.num_replicas_in_sync
    return [np.arange(size, dtype=np.float32) + 100 * i for i in range(NUM_STEPS)]


def _whole(strategy: jaxdist.Strategy, batch: Any) -> list[float]:
    values = strategy.experimental_local_results(batch)
    return np.concatenate([np.asarray(v) for v in values]).tolist()


def _own(strategy: jaxdist.Strategy, step: np.ndarray) -> list[float]:
    """The rows that the replicas of this process get of a step."""
    parts = np.split(step, strategy.num_replicas_in_sync)
    return np.concatenate(of_this_process(strategy, parts)).tolist()


@WAYS
def test_there_is_one_class_of_datasets_and_one_of_iterators(
    strategy: jaxdist.Strategy, way: Way
) -> None:
    data = way(strategy, _steps(strategy))
    assert type(data) is DistributedDataset
    assert type(iter(data)) is DistributedIterator


@WAYS
def test_all_ways_to_take_a_batch_give_the_next_one_and_end_as_documented(
    strategy: jaxdist.Strategy, way: Way
) -> None:
    steps = _steps(strategy)
    iterator = iter(way(strategy, steps))
    taken = [next(iterator), iterator.get_next(), iterator.get_next_as_optional().get_value()]
    assert [_whole(strategy, b) for b in taken] == [_own(strategy, s) for s in steps]
    assert not iterator.get_next_as_optional().has_value()
    with pytest.raises(OutOfRangeError, match="after 3 batches"):
        iterator.get_next()
    with pytest.raises(StopIteration):
        next(iterator)


@WAYS
def test_a_batch_is_plain_arrays_exactly_where_there_is_one_replica(
    strategy_row: Row, way: Way
) -> None:
    strategy = strategy_row.make()
    batch: Any = next(iter(way(strategy, _steps(strategy))))
    kind = jax.Array if strategy_row.num_replicas == 1 else jaxdist.PerReplica
    assert isinstance(batch, kind)
    array = batch.array if isinstance(batch, jaxdist.PerReplica) else batch
    assert array.sharding.device_set == set(strategy.mesh.devices.ravel())


@WAYS
def test_every_pass_begins_anew_and_the_spec_costs_no_batch(
    strategy: jaxdist.Strategy, way: Way
) -> None:
    steps = _steps(strategy)
    data = way(strategy, steps)
    assert data.element_spec == jax.ShapeDtypeStruct((2,), np.float32)
    iterator = iter(data)
    assert iterator.element_spec == data.element_spec
    for one_pass in (iterator, data):
        assert [_whole(strategy, b) for b in one_pass] == [_own(strategy, s) for s in steps]
    assert data.reduce(0, lambda count, _: count + 1) == NUM_STEPS


@WAYS
def test_a_function_takes_a_new_batch_at_every_call(strategy: jaxdist.Strategy, way: Way) -> None:
    steps = _steps(strategy)

    @jaxdist.function
    def train_step(iterator: DistributedIterator) -> Any:
        sums = strategy.run(lambda x: x.sum(), (next(iterator),))
        return strategy.reduce("sum", sums, axis=None)

    iterator = iter(way(strategy, steps))
    assert [float(train_step(iterator)) for _ in steps] == [float(s.sum()) for s in steps]
    with pytest.raises(OutOfRangeError):
        train_step(iterator)


@WAYS
def test_a_step_takes_its_batch_outside(strategy: jaxdist.Strategy, way: Way) -> None:
    iterator = iter(way(strategy, _steps(strategy)))
    with pytest.raises(ContextError, match="traced once"):
        strategy.run(lambda: next(iterator))
    assert _whole(strategy, next(iterator)) == _own(strategy, _steps(strategy)[0])


@WAYS
def test_a_position_is_returned_to(strategy: jaxdist.Strategy, way: Way) -> None:
    steps = _steps(strategy)
    data = way(strategy, steps)
    iterator = iter(data)
    next(iterator)
    state = iterator.get_state()
    list(iterator)
    other = iter(data)
    other.set_state(state)
    assert [_whole(strategy, b) for b in other] == [_own(strategy, s) for s in steps[1:]]


@WAYS
def test_a_closed_iterator_says_so(strategy: jaxdist.Strategy, way: Way) -> None:
    with iter(way(strategy, _steps(strategy))) as iterator:
        next(iterator)
    with pytest.raises(ContextError, match="closed"):
        next(iterator)


@WAYS
def test_an_iterator_is_initialized_again_as_in_version_1(
    strategy: jaxdist.Strategy, way: Way
) -> None:
    steps = _steps(strategy)
    iterator = iter(way(strategy, steps))
    for _ in range(2):
        assert iterator.initialize() == []
        assert [_whole(strategy, b) for b in iterator] == [_own(strategy, s) for s in steps]


@WAYS
def test_the_length_is_the_number_of_steps(strategy: jaxdist.Strategy, way: Way) -> None:
    data = way(strategy, _steps(strategy))
    if strategy.layout.is_shared and way is _from_function:
        # The functions of other processes may give fewer.
        assert data.cardinality == UNKNOWN_CARDINALITY
        assert len(list(data)) == NUM_STEPS
        return
    assert len(data) == data.cardinality == len(list(data)) == NUM_STEPS


# JAX warns of some of them already when it looks for leaves.
@pytest.mark.filterwarnings("ignore:Python iterable type:DeprecationWarning")
@pytest.mark.parametrize("kind", ["list", "generator", "map", "grain"])
def test_an_iterator_of_other_libraries_is_no_argument(
    strategy: jaxdist.Strategy, kind: str
) -> None:
    steps = _steps(strategy)
    iterator = {
        "list": lambda: iter(steps),
        "generator": lambda: (x for x in steps),
        "map": lambda: map(np.negative, steps),
        "grain": lambda: iter(grain.MapDataset.source(steps).to_iter_dataset()),
    }[kind]()
    with pytest.raises(ArgumentTypeError, match=r"args\[0\], an iterator"):
        jaxdist.function(lambda it: next(it) + 1)(iterator)
    with pytest.raises(ArgumentTypeError, match=r"args\[0\]\['data'\], an iterator"):
        strategy.run(lambda data: next(data["data"]) + 1, ({"data": iterator},))


def test_what_is_no_dataset_is_refused(strategy: jaxdist.Strategy) -> None:
    for bad in (3, None, "data", {"x": np.zeros(8)}, np.zeros(8)):
        with pytest.raises(ArgumentTypeError, match="iterable of batches"):
            strategy.experimental_distribute_dataset(bad)
    with pytest.raises(ArgumentTypeError):
        strategy.distribute_datasets_from_function([np.zeros(8)])  # type: ignore[arg-type]


# Lengths: of one kind of strategy each, since they are the dataset's


def _count_to_three() -> Iterator[np.ndarray]:
    for _ in range(3):
        yield np.zeros(4)


class _NotCountable:
    """Has a `len` that answers as torch's DataLoader of a stream does."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __len__(self) -> int:
        raise self._error

    def __iter__(self) -> Iterator[np.ndarray]:
        return _count_to_three()


@pytest.mark.parametrize(
    "source",
    [_count_to_three, _NotCountable(TypeError("no len")), _NotCountable(NotImplementedError())],
    ids=["function", "TypeError", "NotImplementedError"],
)
def test_a_length_that_is_not_known_is_a_type_error_and_the_dataset_is_still_true(
    source: Any,
) -> None:
    data = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"]).experimental_distribute_dataset(source)
    assert data.cardinality == UNKNOWN_CARDINALITY
    with pytest.raises(TypeError, match="number of batches is unknown"):
        len(data)
    assert data
    assert len(list(data)) == 3


def test_a_dataset_without_end_has_no_length() -> None:
    endless = batches(np.zeros(4), 2, repeat=None)
    data = jaxdist.get_strategy().experimental_distribute_dataset(endless)
    assert data.cardinality == INFINITE_CARDINALITY
    with pytest.raises(TypeError, match="no end"):
        len(data)
    assert data
    assert endless


def test_an_empty_dataset_has_the_length_0_and_is_true() -> None:
    data = jaxdist.get_strategy().experimental_distribute_dataset([])
    assert len(data) == 0
    assert data


@pytest.mark.parametrize("policy", PartialBatch)
@pytest.mark.parametrize("repeat", [1, 2])
@pytest.mark.parametrize("drop_remainder", [False, True])
@pytest.mark.parametrize(("num_examples", "size"), [(16, 4), (17, 4), (18, 4), (12, 5), (14, 5)])
def test_lengths_count_the_batches_that_are_given(
    num_examples: int, size: int, drop_remainder: bool, repeat: int, policy: PartialBatch
) -> None:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    source = batches(np.arange(num_examples), size, drop_remainder=drop_remainder, repeat=repeat)
    data = strategy.experimental_distribute_dataset(source, InputOptions(partial_batch=policy))
    try:
        given = len(list(data))
    except jaxdist.errors.ShapeError:
        assert policy in (PartialBatch.ERROR, PartialBatch.DROP)
    else:
        assert len(data) == given
