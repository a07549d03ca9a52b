"""A batch whose leaves have different numbers of examples, from every kind of source."""

from collections.abc import Callable, Iterator
from typing import Any

import grain
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxdist
from jaxdist.data import InputOptions, InputReplicationMode, PartialBatch
from jaxdist.errors import ShapeError
from tests.strategies_under_test import STRATEGIES
from tests.tables import examples

Batch = dict[str, Any]


class _Loader:
    """Like a torch DataLoader: it has a length and begins anew."""

    def __init__(self, elements: list[Batch]) -> None:
        self.elements = elements

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.elements)

    def __len__(self) -> int:
        return len(self.elements)


class _TfData:
    """Like a tf.data dataset."""

    def __init__(self, elements: list[Batch]) -> None:
        self.elements = elements

    def __iter__(self) -> Iterator[Batch]:
        raise AssertionError("as_numpy_iterator is there")

    def as_numpy_iterator(self) -> Iterator[Batch]:
        return iter(self.elements)

    def cardinality(self) -> int:
        return len(self.elements)


class _Elements:
    """What Grain calls a random access data source."""

    def __init__(self, elements: list[Batch]) -> None:
        self.elements = elements

    def __len__(self) -> int:
        return len(self.elements)

    def __getitem__(self, index: int) -> Batch:
        return self.elements[index]


def _function(elements: list[Batch]) -> Callable[[], Iterator[Batch]]:
    def pass_over() -> Iterator[Batch]:
        yield from elements

    return pass_over


SOURCES: dict[str, Callable[[list[Batch]], Any]] = {
    "list": lambda elements: elements,
    "generator": lambda elements: (e for e in elements),
    "function": _function,
    "loader": _Loader,
    "tf_data": _TfData,
    "grain": lambda elements: grain.MapDataset.source(_Elements(elements)),
    "grain_iter": lambda elements: grain.MapDataset.source(_Elements(elements)).to_iter_dataset(),
    "jax_arrays": lambda elements: [jax.tree.map(jax.numpy.asarray, e) for e in elements],
}
WAYS: dict[str, Callable[[jaxdist.Strategy, Any, InputOptions], Any]] = {
    "split": lambda strategy, source, options: strategy.experimental_distribute_dataset(
        source, options
    ),
    "function": lambda strategy, source, options: strategy.distribute_datasets_from_function(
        lambda context: source, options
    ),
}
GOOD = {"image": np.zeros((16, 2), np.float32), "label": np.zeros(16, np.int32)}
BAD = {"image": np.zeros((16, 2), np.float32), "label": np.zeros(8, np.int32)}


def _mirrored() -> jaxdist.Strategy:
    return jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])


def _must_name_both(error: ShapeError, element: int) -> None:
    for part in (
        f"element {element} of the dataset",
        "batch['image'] is float32[16, 2]: 16 rows",
        "batch['label'] is int32[8]: 8 rows",
    ):
        assert part in str(error)


@pytest.mark.parametrize("policy", PartialBatch)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("source", SOURCES)
def test_the_first_batch_of_every_kind_of_source_is_refused_with_path_and_both_numbers(
    source: str, way: str, policy: PartialBatch
) -> None:
    options = InputOptions(partial_batch=policy)
    data = WAYS[way](_mirrored(), SOURCES[source]([BAD, BAD]), options)
    with pytest.raises(ShapeError) as caught:
        next(iter(data))
    _must_name_both(caught.value, 0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("source", SOURCES)
def test_a_later_batch_alone_is_refused_after_those_before_it_were_given(
    source: str, way: str
) -> None:
    data = WAYS[way](_mirrored(), SOURCES[source]([GOOD] * 4 + [BAD] * 2), InputOptions())
    iterator = iter(data)
    for _ in range(4 if way == "split" else 2):
        next(iterator)
    with pytest.raises(ShapeError) as caught:
        next(iterator)
    _must_name_both(caught.value, 4)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("row", STRATEGIES, ids=lambda row: row.name)
def test_every_strategy_refuses_such_a_batch(row: Any, way: str) -> None:
    data = WAYS[way](row.make(), [BAD] * row.num_replicas, InputOptions())
    with pytest.raises(ShapeError, match=r"16 rows[^$]*8 rows"):
        next(iter(data))


def test_a_dataset_of_each_replica_is_refused_as_well() -> None:
    mode = InputOptions(experimental_replication_mode=InputReplicationMode.PER_REPLICA)
    data = _mirrored().distribute_datasets_from_function(
        lambda context: [GOOD, BAD if context.input_pipeline_id else GOOD], mode
    )
    iterator = iter(data)
    next(iterator)
    with pytest.raises(ShapeError) as caught:
        next(iterator)
    _must_name_both(caught.value, 1)


def test_arrays_in_memory_are_refused_before_the_first_batch() -> None:
    with pytest.raises(ShapeError, match=r"\['image'\][^$]*16, 2[^$]*\['label'\][^$]*\[8\]"):
        jaxdist.data.batches(BAD, 4)


def test_the_leaf_that_differs_is_shown_among_very_many() -> None:
    batch = {f"x{i:03}": np.zeros(16) for i in range(50)} | {"z": np.zeros(8)}
    with pytest.raises(ShapeError, match=r"x000'\][^$]*16 rows[^$]*batch\['z'\][^$]*8 rows"):
        next(iter(_mirrored().experimental_distribute_dataset([batch])))


@settings(deadline=None, max_examples=examples(20, long=400))
@given(
    rows=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    num_replicas=st.integers(1, 4),
    policy=st.sampled_from(list(PartialBatch)),
    way=st.sampled_from(sorted(WAYS)),
)
def test_a_batch_is_given_only_if_all_leaves_have_the_same_rows(
    rows: list[int], num_replicas: int, policy: PartialBatch, way: str
) -> None:
    strategy = jaxdist.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)])
    batch = {str(i): np.arange(count) for i, count in enumerate(rows)}
    data = WAYS[way](strategy, [batch] * num_replicas, InputOptions(partial_batch=policy))
    cannot_share = way == "split" and rows[0] % num_replicas > 0
    if len(set(rows)) > 1:
        with pytest.raises(ShapeError, match="different numbers of rows"):
            list(data)
    elif cannot_share and policy in (PartialBatch.DROP, PartialBatch.ERROR):
        with pytest.raises(ShapeError, match=r"left out|cannot split"):
            list(data)
    else:
        assert len(list(data)) == (num_replicas if way == "split" else 1)
