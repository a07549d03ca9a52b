"""What can be a dataset: lists, loaders of tensors, Grain, tf.data; and positions in them."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

from jaxdist import PerReplica
from jaxdist.data import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    InputOptions,
    InputReplicationMode,
    PartialBatch,
    batches,
    distribute_dataset,
    distribute_datasets_from_function,
)
from jaxdist.errors import ArgumentError, ArgumentTypeError
from tests.layouts import make_layout
from tests.strategies.oracle import refused


def _ids(batch: Any) -> list[int]:
    values = batch.values if isinstance(batch, PerReplica) else (batch,)
    return [int(i) for v in values for i in np.asarray(v).ravel()]


# Lists


def test_a_list_of_batches_has_positions() -> None:
    elements = [np.arange(i, i + 3) for i in (0, 3, 6)]
    iterator = iter(distribute_dataset(elements, make_layout(2)))
    next(iterator)
    state = json.loads(json.dumps(iterator.get_state()))
    resumed = iter(distribute_dataset(elements, make_layout(3)))
    resumed.set_state(state)
    assert [_ids(b) for b in resumed] == [_ids(b) for b in iterator] == [[3, 4, 5], [6, 7, 8]]


def test_a_position_in_another_list_is_refused_with_both_lengths() -> None:
    state = iter(distribute_dataset([np.zeros(2)] * 5, make_layout(2))).get_state()
    iterator = iter(distribute_dataset([np.zeros(2)] * 3, make_layout(2)))
    with pytest.raises(ArgumentError, match=r"of 5 elements, and this one has 3"):
        iterator.set_state(state)
    assert len(list(iterator)) == 3


@pytest.mark.parametrize("position", [None, 1, {"elements": 3}, {"elements": 3, "state": 4}])
def test_a_damaged_position_in_a_list_is_refused_and_changes_nothing(position: Any) -> None:
    iterator = iter(distribute_dataset([np.zeros(2)] * 3, make_layout(2)))
    next(iterator)
    with pytest.raises(ArgumentError, match=r"The source of a state|the position 4"):
        iterator.set_state({"steps": 1, "source": position})
    assert len(list(iterator)) == 2


# Loaders of tensors


class Tensor:
    """As tensors of other libraries: it gives its array through `numpy()`, and is no array."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def numpy(self) -> np.ndarray:
        return self._array


class Loader:
    """As PyTorch's `DataLoader`: it makes an iterator for each pass, and gives lists of tensors."""

    def __init__(self, rows: int, batch_size: int) -> None:
        self._starts = range(0, rows, batch_size)
        self._rows = np.arange(rows)
        self._batch_size = batch_size

    def __iter__(self) -> Iterator[list[Tensor]]:
        for start in self._starts:
            x = self._rows[start : start + self._batch_size]
            yield [Tensor(x), Tensor(x * 10)]

    def __len__(self) -> int:
        return len(self._starts)


def test_tensors_that_have_numpy_alone_are_read() -> None:
    data = distribute_dataset(Loader(7, 3), make_layout(2))
    assert data.cardinality == 3
    for _ in range(2):
        assert [_ids(x) for x, _ in data] == [[0, 1, 2], [3, 4, 5], [6]]
    assert [_ids(y) for _, y in data] == [[0, 10, 20], [30, 40, 50], [60]]


def test_tensors_that_numpy_cannot_hold_are_exchanged() -> None:
    class Bfloat16(Tensor):
        """As PyTorch's tensors of this dtype."""

        def __init__(self) -> None:
            self._held: Any = jax.numpy.arange(4, dtype=jax.numpy.bfloat16)

        def __array__(self, *_: Any, **__: Any) -> np.ndarray:
            raise TypeError("unsupported ScalarType BFloat16")

        def __dlpack__(self, **kwargs: Any) -> Any:
            return self._held.__dlpack__(**kwargs)

        def __dlpack_device__(self) -> Any:
            return self._held.__dlpack_device__()

    (batch,) = distribute_dataset([Bfloat16()], make_layout(2))
    assert batch.array.dtype == jax.numpy.bfloat16
    assert _ids(batch) == [0, 1, 2, 3]


def test_a_function_that_makes_no_dataset_is_refused_with_what_it_gave() -> None:
    data = distribute_dataset(lambda: 5, make_layout(2))
    with refused(ArgumentTypeError, "calling it gave 5, of type int", "an iterable of batches"):
        next(iter(data))


def test_an_error_of_a_container_reaches_the_caller_as_it_is() -> None:
    class Locked:
        """A container that cannot be opened."""

    def open_locked(_: Locked) -> Any:
        raise ValueError("the key is lost")

    jax.tree_util.register_pytree_node(Locked, open_locked, lambda *_: Locked())
    elements = [{"x": np.ones(4), "y": Locked()}]
    for dataset in (elements, iter(elements)):
        with pytest.raises(ValueError, match="the key is lost"):
            list(distribute_dataset(dataset, make_layout(2)))


@pytest.mark.parametrize(
    "make", [list, iter, lambda x: _Elements(x)], ids=["list", "iter", "class"]
)
def test_keys_that_cannot_be_sorted_are_named_with_their_element(make: Any) -> None:
    good, bad = {"x": np.ones(4)}, {"x": np.ones(4), "y": {"a": np.ones(4), 1: np.ones(4)}}
    for elements, number in (([bad], 0), ([good, bad], 1)):
        with refused(ArgumentError, f"element {number}", "batch['y']", "'a', 1", "sorts"):
            list(distribute_dataset(make(elements), make_layout(2)))


class _Elements:
    def __init__(self, elements: list[Any]) -> None:
        self._elements = elements

    def __iter__(self) -> Iterator[Any]:
        return iter(self._elements)


def test_a_tensor_that_cannot_be_read_is_named() -> None:
    class OnAnotherDevice(Tensor):
        def numpy(self) -> np.ndarray:
            raise TypeError("copy it to the host first")

    elements = [{"x": np.zeros(2), "y": OnAnotherDevice(np.zeros(2))}]
    with pytest.raises(ArgumentTypeError, match=r"batch\['y'\] is a OnAnotherDevice"):
        list(distribute_dataset(elements, make_layout(2)))


# tf.data, by what its datasets have


class TfTensor:
    """An eager tensor that must not be met: reading it one by one is what is avoided."""

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        raise AssertionError("read through as_numpy_iterator()")


class TfDataset:
    """As `tf.data.Dataset`: iterable, countable by a method, and readable as NumPy arrays."""

    def __init__(self, elements: list[Any], cardinality: int) -> None:
        self._elements = elements
        self._cardinality = cardinality

    def __iter__(self) -> Iterator[Any]:
        return iter([TfTensor()] * len(self._elements))

    def as_numpy_iterator(self) -> Iterator[Any]:
        return iter(self._elements)

    def cardinality(self) -> np.ndarray:
        return np.asarray(self._cardinality, np.int64)

    def __len__(self) -> int:
        raise TypeError("the dataset length is unknown")


@pytest.mark.parametrize("cardinality", [2, INFINITE_CARDINALITY, UNKNOWN_CARDINALITY])
def test_a_tf_dataset_is_read_as_numpy_arrays_and_counted_by_its_method(cardinality: int) -> None:
    data = distribute_dataset(TfDataset([np.arange(4), np.arange(3)], cardinality), make_layout(2))
    assert data.cardinality == cardinality
    for _ in range(2):
        assert [_ids(b) for b in data] == [[0, 1, 2, 3], [0, 1, 2]]


def test_a_tf_dataset_of_a_function_gives_elements_to_the_replicas() -> None:
    data = distribute_datasets_from_function(
        lambda _: TfDataset([np.arange(2), np.arange(3)], 2), make_layout(2)
    )
    assert [_ids(b) for b in data] == [[0, 1, 0, 1, 2]]
    assert data.cardinality == 1


def test_a_tf_dataset_has_no_positions_and_says_so() -> None:
    iterator = iter(distribute_dataset(TfDataset([np.arange(4)], 1), make_layout(2)))
    with pytest.raises(ArgumentTypeError, match="no get_state"):
        iterator.get_state()


# Iterators with positions and threads of their own


class Positioned(Iterator[np.ndarray]):
    """As Grain's iterators: state in a dict, closed for ever by `close`."""

    open_count = 0

    def __init__(self) -> None:
        self._next, self._is_closed = 0, False
        Positioned.open_count += 1

    def __next__(self) -> np.ndarray:
        assert not self._is_closed
        if self._next == 4:
            raise StopIteration
        self._next += 1
        return np.arange(2) + 2 * (self._next - 1)

    def get_state(self) -> dict[str, int]:
        return {"next_index": self._next}

    def set_state(self, state: dict[str, int]) -> None:
        assert not self._is_closed
        self._next = state["next_index"]

    def close(self) -> None:
        assert not self._is_closed
        self._is_closed = True
        Positioned.open_count -= 1


class PositionedDataset:
    """Makes a new iterator for each pass."""

    def __iter__(self) -> Positioned:
        return Positioned()


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_the_iterator_of_a_pass_is_closed_however_the_pass_ends(depth: int) -> None:
    options = InputOptions(experimental_per_replica_buffer_size=depth)
    data = distribute_dataset(PositionedDataset(), make_layout(2), options)
    Positioned.open_count = 0
    assert len(list(data)) == 4
    with iter(data) as iterator:
        next(iterator)
        assert Positioned.open_count == 1
    assert Positioned.open_count == 0


def test_a_closed_iterator_is_made_anew_where_a_state_is_set() -> None:
    data = distribute_dataset(PositionedDataset(), make_layout(2))
    iterator = iter(data)
    next(iterator)
    state = iterator.get_state()
    for end in (iterator.close, lambda: list(iterator)):
        end()
        iterator.set_state(state)
        assert _ids(next(iterator)) == [2, 3]
    iterator.close()


def test_a_state_that_the_dataset_refuses_is_shown_with_its_reason() -> None:
    iterator = iter(distribute_dataset(PositionedDataset(), make_layout(2)))
    next(iterator)
    with pytest.raises(ArgumentError, match=r"Positioned refused[^$]*KeyError: 'next_index'"):
        iterator.set_state({"steps": 1, "source": {"index": 3}})
    assert _ids(next(iterator)) == [2, 3]
    iterator.close()


# Grain itself


@pytest.fixture
def grain() -> Any:
    """Grain, where it is installed."""
    return pytest.importorskip("grain")


def _grain_datasets(grain: Any, rows: int, batch_size: int) -> dict[str, Any]:
    ids = np.arange(rows)
    mapped = grain.MapDataset.source(ids).shuffle(seed=1).batch(batch_size)
    loader = grain.DataLoader(
        data_source=ids,
        sampler=grain.samplers.IndexSampler(
            num_records=rows,
            shard_options=grain.sharding.NoSharding(),
            shuffle=True,
            num_epochs=1,
            seed=2,
        ),
        operations=[grain.transforms.Batch(batch_size)],
        worker_count=0,
    )
    return {"map": mapped, "iter": mapped.to_iter_dataset(), "loader": loader}


@pytest.mark.parametrize("kind", ["map", "iter", "loader"])
@pytest.mark.parametrize("policy", [PartialBatch.UNEVEN, PartialBatch.PAD])
def test_grain_datasets_give_each_example_once_and_resume_from_any_state(
    grain: Any, kind: str, policy: PartialBatch
) -> None:
    options = InputOptions(partial_batch=policy)

    def make(num_replicas: int) -> Any:
        dataset = _grain_datasets(grain, 11, 4)[kind]
        return iter(distribute_dataset(dataset, make_layout(num_replicas), options))

    def ids(element: Any) -> list[int]:
        if policy is PartialBatch.UNEVEN:
            return _ids(element)
        batch, mask = element
        return [i for i, real in zip(_ids(batch), _ids(mask), strict=True) if real]

    with make(1) as whole:
        expected = [ids(b) for b in whole]
    assert sorted(i for step in expected for i in step) == list(range(11))
    for taken in range(4):
        with make(4) as first, make(3) as resumed:
            before = [ids(next(first)) for _ in range(taken)]
            resumed.set_state(first.get_state())
            assert before + [ids(b) for b in resumed] == expected


def test_a_state_of_another_grain_dataset_is_refused(grain: Any) -> None:
    state = iter(
        distribute_dataset(_grain_datasets(grain, 11, 4)["map"], make_layout(2))
    ).get_state()
    iterator = iter(distribute_dataset(_grain_datasets(grain, 11, 2)["map"], make_layout(2)))
    with pytest.raises(ArgumentError, match="of 3 elements, and this one has 6"):
        iterator.set_state(state)
    loader = iter(distribute_dataset(_grain_datasets(grain, 11, 2)["loader"], make_layout(2)))
    with pytest.raises(ArgumentError, match="a state that DataLoaderIterator refused"):
        loader.set_state(state)
    for open_iterator in (iterator, loader):
        open_iterator.close()


def test_grain_datasets_are_counted(grain: Any) -> None:
    mapped = _grain_datasets(grain, 11, 4)["map"]
    assert distribute_dataset(mapped, make_layout(2)).cardinality == 3
    assert distribute_dataset(mapped.repeat(), make_layout(2)).cardinality == INFINITE_CARDINALITY
    endless = distribute_datasets_from_function(lambda _: mapped.repeat(), make_layout(2))
    assert endless.cardinality == INFINITE_CARDINALITY


def test_unbatched_grain_datasets_of_a_function_go_to_the_replicas_one_by_one(grain: Any) -> None:
    dataset = grain.MapDataset.source(np.arange(5))
    data = distribute_datasets_from_function(lambda _: dataset, make_layout(2))
    assert [_ids(b) for b in data] == [[0, 1], [2, 3], [4, 0]]


def test_one_grain_dataset_for_each_replica_resumes(grain: Any) -> None:
    options = InputOptions(experimental_replication_mode=InputReplicationMode.PER_REPLICA)

    def make() -> Any:
        return distribute_datasets_from_function(
            lambda c: grain.MapDataset.source(np.arange(7))[c.input_pipeline_id :: 2].batch(2),
            make_layout(2),
            options,
        )

    with iter(make()) as iterator, iter(make()) as resumed:
        assert _ids(next(iterator)) == [0, 2, 1, 3]
        resumed.set_state(iterator.get_state())
        assert [_ids(b) for b in resumed] == [_ids(b) for b in iterator] == [[4, 6, 5]]


def test_no_thread_of_grain_outlives_the_iterator(grain: Any) -> None:
    before = set(threading.enumerate())
    dataset = _grain_datasets(grain, 100, 2)["map"]
    with iter(distribute_dataset(dataset, make_layout(2))) as iterator:
        next(iterator)
    for thread in set(threading.enumerate()) - before:
        thread.join(30)
        assert not thread.is_alive(), thread.name


# Batches that are divided already


def _distributed_again(kind: str) -> Any:
    layout = make_layout(4)
    once = distribute_dataset([np.arange(8)] * 4, layout)
    return {
        "a distributed dataset": lambda: distribute_dataset(once, layout),
        "its iterator": lambda: distribute_dataset(iter(once), layout),
        "a loader over it": lambda: distribute_dataset(lambda: ({"x": b} for b in once), layout),
        "a list of its batches": lambda: distribute_dataset(list(once), layout),
        "a function of it": lambda: distribute_datasets_from_function(lambda _: once, layout),
    }[kind]()


@pytest.mark.parametrize(
    "kind",
    [
        "a distributed dataset",
        "its iterator",
        "a loader over it",
        "a list of its batches",
        "a function of it",
    ],
)
def test_batches_that_are_divided_already_are_not_divided_again(kind: str) -> None:
    with pytest.raises(ArgumentTypeError, match="element 0 has a part for each replica"):
        next(iter(_distributed_again(kind)))


@pytest.mark.parametrize("kind", ["batches", "list"])
@pytest.mark.parametrize("number", [np.int32, np.int64, np.uint8])
def test_a_position_may_consist_of_numbers_of_numpy(kind: str, number: Any) -> None:
    def make() -> Any:
        rows = np.arange(12)
        data = batches(rows, 4, shuffle=True) if kind == "batches" else np.split(rows, 3)
        return iter(distribute_dataset(data, make_layout(2)))

    iterator, resumed = make(), make()
    next(iterator)
    state = jax.tree.map(lambda n: n if isinstance(n, bool) else number(n), iterator.get_state())
    resumed.set_state(state)
    assert _ids(next(resumed)) == _ids(next(iterator))
    # The position that follows is plain again.
    assert json.loads(json.dumps(resumed.get_state())) == iterator.get_state()
    assert [_ids(b) for b in resumed] == [_ids(b) for b in iterator]
