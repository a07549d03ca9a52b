"""What the options make of batches that cannot be shared evenly: padded, left out, refused."""

import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdist
from jaxdist import PerReplica
from jaxdist.data import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    InputContext,
    InputOptions,
    InputReplicationMode,
    PartialBatch,
    batches,
    distribute_dataset,
    distribute_datasets_from_function,
)
from jaxdist.errors import ShapeError
from tests.layouts import make_layout

PAD = InputOptions(partial_batch=PartialBatch.PAD)
DROP = InputOptions(partial_batch=PartialBatch.DROP)
PER_REPLICA = InputReplicationMode.PER_REPLICA


def _locals(batch: Any) -> list[Any]:
    values = batch.values if isinstance(batch, PerReplica) else (batch,)
    return [np.asarray(v).tolist() for v in values]


# PAD


@pytest.mark.parametrize("fetch", [True, False])
@pytest.mark.parametrize("num_replicas", [1, 3, 8])
def test_padded_batches_have_one_shape_and_a_mask_of_the_real_rows(
    num_replicas: int, fetch: bool
) -> None:
    x = np.arange(1, 21, dtype=np.float32).reshape(10, 2)
    options = PAD._replace(experimental_fetch_to_device=fetch)
    data = distribute_dataset(batches(x, 4), make_layout(num_replicas), options)
    padded = -(-4 // num_replicas) * num_replicas
    held = []
    for batch, mask in data:
        rows, real = (
            np.concatenate([np.asarray(v) for v in jax.tree.leaves(t)])
            if not fetch
            else np.asarray(jax.tree.leaves(t)[0])
            for t in (batch, mask)
        )
        assert rows.shape == (padded, 2)
        assert real.shape == (padded,)
        assert real.dtype == np.bool_
        assert (rows[~real] == 0).all()
        held.append(rows[real])
    assert [len(h) for h in held] == [4, 4, 2]
    np.testing.assert_array_equal(np.concatenate(held), x)


def test_padding_goes_to_the_last_replicas() -> None:
    ((batch, mask),) = distribute_dataset([np.arange(1, 6)], make_layout(4), PAD)
    assert _locals(batch) == [[1, 2], [3, 4], [5, 0], [0, 0]]
    assert _locals(mask) == [[True, True], [True, True], [True, False], [False, False]]


def test_batches_and_masks_are_laid_out_over_the_replicas_full_or_not() -> None:
    layout = make_layout(4)
    for batch, mask in distribute_dataset(batches({"x": np.zeros((10, 3))}, 8), layout, PAD):
        assert batch["x"].array.sharding == mask.array.sharding == layout.per_replica
        assert batch["x"].array.shape == (8, 3)


def test_a_step_over_padded_batches_is_compiled_once() -> None:
    strategy = jaxdist.MirroredStrategy([f"cpu:{i}" for i in range(4)])
    traces = []

    def step(batch: jax.Array, mask: jax.Array) -> jax.Array:
        traces.append(batch.shape)
        kept = jnp.sum(jnp.where(mask, batch, 0.0))
        context = jaxdist.get_replica_context()
        total: jax.Array = context.all_reduce(jaxdist.ReduceOp.SUM, kept)
        return total

    x = np.arange(21, dtype=np.float32)
    data = strategy.experimental_distribute_dataset(batches(x, 6), PAD)
    totals = [float(strategy.run(step, args=pair)) for pair in data]
    assert totals == [x[i : i + 6].sum() for i in range(0, 21, 6)]
    assert traces == [(2,)]


def test_a_later_batch_that_is_larger_is_refused_with_both_numbers() -> None:
    elements = [{"x": np.zeros((4, 2), np.float32)}, {"x": np.zeros((9, 2), np.float32)}]
    data = iter(distribute_dataset(elements, make_layout(4), PAD))
    next(data)
    with pytest.raises(ShapeError) as caught:
        next(data)
    for part in ("batch 1", "to 4 rows", "has 9", "batch['x'] is float32[9, 2]", "12 rows or more"):
        assert part in str(caught.value)


def test_a_larger_batch_that_fits_into_the_padding_is_taken() -> None:
    data = distribute_dataset([np.arange(5), np.arange(8)], make_layout(4), PAD)
    assert [int(np.sum(mask.array)) for _, mask in data] == [5, 8]


def test_leaves_with_different_rows_cannot_have_one_mask() -> None:
    elements = [{"x": np.zeros(4), "y": np.zeros(5)}]
    with pytest.raises(ShapeError, match=r"batch\['x'\][^$]*4 rows[^$]*batch\['y'\][^$]*5 rows"):
        list(distribute_dataset(elements, make_layout(2), PAD))


def test_jax_arrays_and_typed_keys_are_padded() -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    elements = [{"k": keys, "x": jnp.arange(1.0, 4.0)}]
    ((batch, mask),) = distribute_dataset(elements, make_layout(2), PAD)
    assert batch["k"].array.shape == (4,)
    assert batch["k"].array.dtype == keys.dtype
    assert _locals(batch["x"]) == [[1, 2], [3, 0]]
    assert _locals(mask) == [[True, True], [True, False]]


def test_one_replica_gets_plain_padded_arrays_and_scalars_as_they_are() -> None:
    elements = [{"x": np.arange(1, 4), "s": 7}, {"x": np.arange(1, 3), "s": 8}]
    (_, _), (batch, mask) = distribute_dataset(elements, make_layout(1), PAD)
    assert batch["x"].tolist() == [1, 2, 0]
    assert int(batch["s"]) == 8
    assert mask.tolist() == [True, True, False]
    ((scalar, real),) = distribute_dataset([5], make_layout(1), PAD)
    assert (int(scalar), bool(real)) == (5, True)


def test_element_spec_of_padded_batches_is_that_of_the_pair() -> None:
    data = distribute_dataset(batches(np.zeros((10, 2), np.float32), 6), make_layout(4), PAD)
    assert data.element_spec == (
        jax.ShapeDtypeStruct((2, 2), np.float32),
        jax.ShapeDtypeStruct((2,), np.bool_),
    )


def test_elements_of_a_function_are_padded_for_each_replica() -> None:
    data = distribute_datasets_from_function(
        lambda _: batches(np.arange(1, 8), 2), make_layout(3), PAD
    )
    (first, first_mask), (last, last_mask) = data
    assert _locals(first) == [[1, 2], [3, 4], [5, 6]]
    assert _locals(first_mask) == [[True, True]] * 3
    assert _locals(last) == [[7, 0], [0, 0], [0, 0]]
    assert _locals(last_mask) == [[True, False], [False, False], [False, False]]
    assert data.cardinality == 2


def test_scalars_of_a_function_have_one_mask_for_each_replica() -> None:
    data = distribute_datasets_from_function(lambda _: range(1, 6), make_layout(3), PAD)
    assert [(_locals(b), _locals(m)) for b, m in data] == [
        ([1, 2, 3], [True, True, True]),
        ([4, 5, 0], [True, True, False]),
    ]


def test_dims_that_cannot_be_padded_are_named() -> None:
    elements = [
        {"x": np.zeros((2, 3)), "y": np.zeros(2)},
        {"x": np.zeros((1, 5)), "y": np.zeros(1)},
    ]
    with pytest.raises(
        ShapeError, match=r"batch\['x'\] is float32\[2, 3\] for replica 0"
    ) as caught:
        list(distribute_datasets_from_function(lambda _: elements, make_layout(2), PAD))
    assert "batch['y']" not in str(caught.value)


# DROP


def test_a_batch_that_cannot_be_shared_evenly_is_left_out_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    data = distribute_dataset(batches(np.arange(11), 4, repeat=2), make_layout(2), DROP)
    with caplog.at_level(logging.WARNING, logger="jaxdist"):
        for _ in range(2):
            assert [_locals(b) for b in data] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]] * 2
    (record,) = caplog.records
    assert "batch 2 of the dataset has 3 example(s), which 2 replicas" in record.getMessage()


def test_a_batch_in_the_middle_is_left_out_too() -> None:
    elements = [np.arange(4), np.arange(3), np.arange(2)]
    data = distribute_dataset(elements, make_layout(2), DROP)
    assert [_locals(b) for b in data] == [[[0, 1], [2, 3]], [[0], [1]]]
    assert data.cardinality == UNKNOWN_CARDINALITY


def test_leaving_out_everything_is_an_error() -> None:
    with pytest.raises(ShapeError, match=r"whole dataset: 3 batch\(es\)"):
        list(distribute_dataset(batches(np.arange(9), 3), make_layout(2), DROP))
    assert list(distribute_dataset([], make_layout(2), DROP)) == []


def test_steps_of_a_function_that_are_not_full_or_not_alike_are_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for rows, per_element in [(14, 4), (10, 4)]:  # the last element is short; one is missing
        source = batches(np.arange(rows), per_element)
        data = distribute_datasets_from_function(lambda _, s=source: s, make_layout(2), DROP)
        assert [_locals(b) for b in data] == [[[0, 1, 2, 3], [4, 5, 6, 7]]]
    assert ["6 example(s)" in r.getMessage() for r in caplog.records] == [True, False]
    assert "2 example(s)" in caplog.records[1].getMessage()


def test_an_endless_dataset_of_uneven_batches_is_an_error_and_not_read_for_ever() -> None:
    data = iter(distribute_dataset(batches(np.arange(9), 3, repeat=None), make_layout(2), DROP))
    with pytest.raises(ShapeError, match="1000 batches in a row"):
        next(data)


@pytest.mark.parametrize("longest", [3, 10**9])
def test_a_pass_over_datasets_of_different_lengths_ends_with_the_shortest(longest: int) -> None:
    def dataset_fn(context: InputContext) -> Any:
        return range(2 if context.input_pipeline_id == 0 else longest)

    options = DROP._replace(experimental_replication_mode=PER_REPLICA)
    data = distribute_datasets_from_function(dataset_fn, make_layout(3), options)
    assert [_locals(b) for b in data] == [[0, 0, 0], [1, 1, 1]]


# How many steps there are


@pytest.mark.parametrize(
    ("policy", "steps"),
    [
        (PartialBatch.UNEVEN, 3),
        (PartialBatch.PAD, 3),
        (PartialBatch.DROP, UNKNOWN_CARDINALITY),
        (PartialBatch.ERROR, 2),
    ],
)
def test_cardinality_of_a_function_dataset_depends_on_the_policy(
    policy: PartialBatch, steps: int
) -> None:
    options = InputOptions(partial_batch=policy)
    data = distribute_datasets_from_function(lambda _: range(10), make_layout(4), options)
    assert data.cardinality == steps


def test_cardinality_of_datasets_for_each_replica_is_that_of_the_longest() -> None:
    def cardinality(policy: PartialBatch, repeats: list[Any]) -> int:
        options = InputOptions(experimental_replication_mode=PER_REPLICA, partial_batch=policy)

        def dataset_fn(context: InputContext) -> Any:
            return batches(np.arange(4), 1, repeat=repeats[context.input_pipeline_id])

        data = distribute_datasets_from_function(dataset_fn, make_layout(2), options)
        return data.cardinality

    assert cardinality(PartialBatch.UNEVEN, [2, 3]) == 12
    assert cardinality(PartialBatch.ERROR, [2, 3]) == 8
    assert cardinality(PartialBatch.UNEVEN, [2, None]) == INFINITE_CARDINALITY
    assert cardinality(PartialBatch.ERROR, [2, None]) == 8
    assert cardinality(PartialBatch.DROP, [None, None]) == INFINITE_CARDINALITY
