"""Splitting of global batches: every example once, and the errors for wrong batches."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdist import PerReplica
from jaxdist.data import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    DistributedDataset,
    InputOptions,
    PartialBatch,
    batches,
    distribute_dataset,
)
from jaxdist.errors import ArgumentTypeError, ContextError, OutOfRangeError, ShapeError
from tests.layouts import make_layout
from tests.tables import examples

ERROR = InputOptions(partial_batch=PartialBatch.ERROR)


def _locals(batch: Any) -> list[list[int]]:
    values = batch.values if isinstance(batch, PerReplica) else (batch,)
    return [np.asarray(v).tolist() for v in values]


@settings(deadline=None, max_examples=examples(60))
@given(
    num_replicas=st.integers(1, 8),
    per_replica=st.integers(1, 4),
    steps=st.integers(1, 4),
    shuffle=st.booleans(),
)
def test_each_example_is_seen_exactly_once_per_epoch(
    num_replicas: int, per_replica: int, steps: int, shuffle: bool
) -> None:
    size = num_replicas * per_replica
    data = distribute_dataset(
        batches(np.arange(size * steps), size, shuffle=shuffle), make_layout(num_replicas)
    )
    for _ in range(2):
        given_ids = [_locals(batch) for batch in data]
        assert all(len(v) == per_replica for step in given_ids for v in step)
        flat = [i for step in given_ids for v in step for i in v]
        assert sorted(flat) == list(range(size * steps))


def test_the_order_of_examples_does_not_depend_on_the_number_of_replicas() -> None:
    source = batches(np.arange(32), 8, shuffle=True, seed=1)

    def order(num_replicas: int) -> list[list[int]]:
        data = distribute_dataset(source, make_layout(num_replicas))
        return [[i for v in _locals(batch) for i in v] for _ in range(2) for batch in data]

    assert order(1) == order(2) == order(4) == order(8)


def test_replica_0_takes_the_first_rows() -> None:
    data = distribute_dataset(batches(np.arange(8), 4), make_layout(2))
    assert [_locals(batch) for batch in data] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


def test_one_replica_gets_plain_arrays_and_scalars_pass_through() -> None:
    (batch,) = distribute_dataset([{"x": np.arange(3), "s": 7}], make_layout(1))
    assert isinstance(batch["x"], jax.Array)
    assert batch["x"].tolist() == [0, 1, 2]
    assert int(batch["s"]) == 7


class Pair(NamedTuple):
    x: Any
    y: Any


def test_the_structure_of_a_batch_is_kept() -> None:
    x = np.arange(4)
    (batch,) = distribute_dataset([Pair(x, {"a": [x, None]})], make_layout(2))
    assert isinstance(batch, Pair)
    assert isinstance(batch.y["a"][0], PerReplica)
    assert batch.y["a"][1] is None


class TensorLike:
    """As tensors of other libraries: NumPy can read it, and that is all."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.arange(4, dtype=dtype)


class Loader:
    """As loaders of other libraries: an iterable with a length."""

    def __iter__(self) -> Iterator[Any]:
        return iter([[TensorLike(), TensorLike()]] * 3)

    def __len__(self) -> int:
        return 3


def test_loaders_of_tensors_are_datasets() -> None:
    data = distribute_dataset(Loader(), make_layout(2))
    assert data.cardinality == 3
    assert [_locals(batch[1]) for batch in data] == [[[0, 1], [2, 3]]] * 3


def _count_to_three() -> Iterator[np.ndarray]:
    for i in range(3):
        yield np.full(2, i)


def test_a_generator_function_is_called_for_each_pass() -> None:
    data = distribute_dataset(_count_to_three, make_layout(2))
    assert (
        [_locals(b) for b in data] == [_locals(b) for b in data] == [[[i], [i]] for i in range(3)]
    )


def test_a_second_pass_over_a_generator_says_that_there_is_only_one() -> None:
    data = distribute_dataset(_count_to_three(), make_layout(2))
    assert len(list(data)) == 3
    with pytest.raises(ContextError, match=r"_count_to_three[^$]*generator function itself"):
        iter(data)


def test_element_spec_is_what_one_replica_gets_and_loses_no_element() -> None:
    data = distribute_dataset(_count_to_three(), make_layout(2))
    assert data.element_spec == jax.ShapeDtypeStruct((1,), np.int32)
    assert len(list(data)) == 3
    assert data.element_spec == jax.ShapeDtypeStruct((1,), np.int32)


def test_element_spec_of_a_shuffled_dataset_does_not_use_up_an_epoch() -> None:
    def passes(*, asks: bool) -> list[Any]:
        data = distribute_dataset(batches(np.arange(16), 8, shuffle=True), make_layout(2))
        if asks:
            assert data.element_spec.shape == (4,)
        return [_locals(b) for _ in range(2) for b in data]

    assert passes(asks=True) == passes(asks=False)


def test_element_spec_of_one_replica_is_the_whole_batch() -> None:
    data = distribute_dataset([{"x": np.zeros((6, 2), np.float32), "s": 1}], make_layout(1))
    spec = data.element_spec
    assert spec["x"] == jax.ShapeDtypeStruct((6, 2), np.float32)
    assert spec["s"].shape == ()


def test_element_spec_of_an_empty_dataset_says_that_it_is_empty() -> None:
    with pytest.raises(OutOfRangeError, match="has no batch"):
        _ = distribute_dataset([], make_layout(2)).element_spec


def test_reduce_carries_a_state_over_one_pass() -> None:
    data = distribute_dataset(batches(np.arange(10), 2), make_layout(2))
    total = data.reduce(0, lambda s, b: s + sum(v[0] for v in _locals(b)))
    assert total == 45
    assert distribute_dataset([], make_layout(2)).reduce("empty", lambda s, _: s) == "empty"


def test_reduce_without_a_function_is_refused() -> None:
    wrong: Any = 3
    with pytest.raises(ArgumentTypeError, match=r"DistributedDataset.reduce"):
        distribute_dataset([], make_layout(2)).reduce(0, wrong)


def test_cardinality_is_that_of_the_dataset() -> None:
    x = np.arange(8)
    assert distribute_dataset(batches(x, 4, repeat=3), make_layout(2)).cardinality == 6
    endless = distribute_dataset(batches(x, 4, repeat=None), make_layout(2))
    assert endless.cardinality == INFINITE_CARDINALITY
    assert distribute_dataset(_count_to_three, make_layout(2)).cardinality == UNKNOWN_CARDINALITY


def test_a_distributed_dataset_says_what_it_is() -> None:
    data = distribute_dataset(Loader(), make_layout(4))
    assert isinstance(data, DistributedDataset)
    assert repr(data) == "DistributedDataset(Loader over 4 replicas)"


def test_check_context_is_asked_before_each_batch() -> None:
    calls = []
    data = distribute_dataset(
        _count_to_three, make_layout(2), check_context=lambda: calls.append("asked")
    )
    assert len(list(data)) == 3
    assert len(calls) == 4


# Batches that cannot be shared out


def test_batches_that_cannot_be_split_list_all_leaves_with_the_remedy() -> None:
    good = {"x": np.zeros((32, 4), np.float32), "y": np.zeros(32, np.int32)}
    bad = {"x": np.zeros((30, 4), np.float32), "y": np.zeros(30, np.int32)}
    data = iter(distribute_dataset([good, bad], make_layout(8), ERROR))
    next(data)
    with pytest.raises(ShapeError) as caught:
        next(data)
    message = str(caught.value)
    for part in (
        "experimental_distribute_dataset",
        "element 1",
        "8 replicas",
        "batch['x'] is float32[30, 4]: dim 0 has 30 rows, and 30 is not a multiple of 8",
        "batch['y'] is int32[30]",
        "drop 6 rows to get 24, or pad with 2 rows to get 32",
        "drop_remainder=True",
        "partial_batch=UNEVEN or PAD",
    ):
        assert part in message


def test_a_batch_smaller_than_the_replicas_is_not_told_to_drop_everything() -> None:
    with pytest.raises(ShapeError, match="pad with 5 rows to get 8") as caught:
        list(distribute_dataset([np.zeros(3)], make_layout(8), ERROR))
    assert "drop 3" not in str(caught.value)


@pytest.mark.parametrize("policy", PartialBatch)
def test_a_scalar_in_a_batch_is_named(policy: PartialBatch) -> None:
    options = InputOptions(partial_batch=policy)
    with pytest.raises(ShapeError, match=r"batch\['lr'\] is a scalar[^$]*one value per") as caught:
        list(distribute_dataset([{"x": np.zeros(4), "lr": 0.1}], make_layout(2), options))
    assert "batch them first" not in str(caught.value)


@pytest.mark.parametrize("policy", PartialBatch)
def test_a_dataset_of_single_examples_is_told_to_batch_them(policy: PartialBatch) -> None:
    options = InputOptions(partial_batch=policy)
    with pytest.raises(ShapeError, match="batch them first"):
        list(distribute_dataset(range(10), make_layout(2), options))


def test_more_than_ten_failing_leaves_are_counted_and_not_listed() -> None:
    batch = {f"x{i:02}": np.zeros(3) for i in range(14)}
    with pytest.raises(ShapeError, match=r"x09[^$]*and 4 more") as caught:
        list(distribute_dataset([batch], make_layout(2), ERROR))
    assert "x10" not in str(caught.value)


@pytest.mark.parametrize(
    "leaf",
    [
        np.array(["a", "b"]),
        np.array([b"a", b"b"]),
        np.array([object(), None]),
        np.array(["2020-01-01", "2020-01-02"], dtype="M8[D]"),
        np.zeros(2, np.longdouble),
        np.zeros(2, [("a", "i4")]),
        "text",
        object(),
    ],
    ids=["str", "bytes", "object", "datetime", "longdouble", "struct", "text", "thing"],
)
def test_leaves_that_are_no_numbers_are_named(leaf: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=r"element 0[^$]*batch\['name'\]") as caught:
        list(distribute_dataset([{"x": np.zeros(2), "name": leaf}], make_layout(2)))
    assert "batch['x']" not in str(caught.value)


def test_a_structure_that_changes_shows_both_and_the_element() -> None:
    elements = [{"x": np.zeros(2, np.int32)}] * 2 + [{"z": np.zeros(2, np.int32)}]
    with pytest.raises(ShapeError, match=r"element 2[^$]*\{'x': int32\}[^$]*\{'z': int32\}"):
        list(distribute_dataset(elements, make_layout(2)))


def test_a_dtype_that_changes_shows_both_and_the_element() -> None:
    elements = [np.zeros(2, np.float32), np.zeros(2, np.int32)]
    with pytest.raises(ShapeError, match=r"element 1[^$]*float32[^$]*int32"):
        list(distribute_dataset(elements, make_layout(2)))


def test_dtypes_that_are_one_on_the_devices_may_alternate() -> None:
    elements = [np.zeros(2, t) for t in (np.float64, np.float32, np.float64)]
    assert len(list(distribute_dataset(elements, make_layout(2)))) == 3


def test_shapes_may_change_from_batch_to_batch() -> None:
    elements = [np.zeros((2, 3)), np.zeros((4, 5))]
    shapes = [b.array.shape for b in distribute_dataset(elements, make_layout(2))]
    assert shapes == [(2, 3), (4, 5)]


def test_an_element_without_arrays_is_refused() -> None:
    with pytest.raises(ShapeError, match=r"element 0[^$]*no arrays"):
        list(distribute_dataset([{}], make_layout(2)))


# What is no dataset


@pytest.mark.parametrize(
    "dataset",
    [np.zeros((4, 2)), {"x": np.zeros(4)}, (np.zeros(4), np.zeros(4)), Pair(1, 2)],
    ids=["array", "dict", "tuple", "namedtuple"],
)
def test_arrays_in_the_place_of_a_dataset_are_pointed_to_batches(dataset: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=r"batches\(arrays, batch_size\)"):
        distribute_dataset(dataset, make_layout(2))


@pytest.mark.parametrize("dataset", [3, None, "path/to/data", b"x"])
def test_what_cannot_be_iterated_is_refused_at_once(dataset: Any) -> None:
    with pytest.raises(ArgumentTypeError, match="dataset is an iterable of batches"):
        distribute_dataset(dataset, make_layout(2))


def test_a_function_of_an_input_context_is_pointed_to_the_other_method() -> None:
    with pytest.raises(ArgumentTypeError, match="distribute_datasets_from_function"):
        distribute_dataset(lambda context: [], make_layout(2))
