"""Batches that the replicas share unevenly: TensorFlow's split, and nothing lost."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdist
from jaxdist import PerReplica
from jaxdist.data import (
    InputContext,
    InputOptions,
    InputReplicationMode,
    batches,
    distribute_dataset,
    distribute_datasets_from_function,
)
from tests.layouts import make_layout


def _locals(batch: Any) -> list[Any]:
    values = batch.values if isinstance(batch, PerReplica) else (batch,)
    return [np.asarray(v).tolist() for v in values]


# The results of `tf.distribute` for these batches, from TensorFlow 2.21.


@pytest.mark.parametrize(
    ("rows", "num_replicas", "sizes"),
    [
        (10, 4, [3, 3, 3, 1]),
        (9, 4, [3, 3, 3, 0]),
        (5, 4, [2, 2, 1, 0]),
        (3, 4, [1, 1, 1, 0]),
        (1, 4, [1, 0, 0, 0]),
        (7, 3, [3, 3, 1]),
        (8, 3, [3, 3, 2]),
        (3, 8, [1, 1, 1, 0, 0, 0, 0, 0]),
    ],
)
def test_replicas_take_the_rounded_up_share_until_nothing_is_left(
    rows: int, num_replicas: int, sizes: list[int]
) -> None:
    (batch,) = distribute_dataset([np.arange(rows)], make_layout(num_replicas))
    assert [len(v) for v in _locals(batch)] == sizes
    assert [i for v in _locals(batch) for i in v] == list(range(rows))


@pytest.mark.parametrize(
    ("num_replicas", "rows", "batch_size", "options", "steps"),
    [
        (2, 7, 4, {}, [[[0, 1], [2, 3]], [[4, 5], [6]]]),
        (2, 6, 4, {}, [[[0, 1], [2, 3]], [[4], [5]]]),
        (2, 5, 4, {}, [[[0, 1], [2, 3]], [[4], []]]),
        (3, 10, 4, {}, [[[0, 1], [2, 3], []], [[4, 5], [6, 7], []], [[8], [9], []]]),
        (3, 9, 4, {}, [[[0, 1], [2, 3], []], [[4, 5], [6, 7], []], [[8], [], []]]),
        (3, 10, 5, {}, [[[0, 1], [2, 3], [4]], [[5, 6], [7, 8], [9]]]),
        (3, 4, 2, {}, [[[0], [1], []], [[2], [3], []]]),
        (3, 3, 1, {}, [[[0], [], []], [[1], [], []], [[2], [], []]]),
        (2, 10, 5, {"drop_remainder": True}, [[[0, 1, 2], [3, 4]], [[5, 6, 7], [8, 9]]]),
        (2, 7, 4, {"drop_remainder": True}, [[[0, 1], [2, 3]]]),
        (2, 5, 4, {"repeat": 2}, [[[0, 1], [2, 3]], [[4], []]] * 2),
    ],
)
def test_steps_are_those_of_tensorflow(
    num_replicas: int, rows: int, batch_size: int, options: dict[str, Any], steps: list[Any]
) -> None:
    source = batches(np.arange(rows), batch_size, **options)
    data = distribute_dataset(source, make_layout(num_replicas))
    assert [_locals(batch) for batch in data] == steps


# How such values are held


def test_leaves_of_an_uneven_batch_are_all_held_one_by_one() -> None:
    even, uneven = {"x": np.arange(8), "y": np.arange(8)}, {"x": np.arange(7), "y": np.arange(7)}
    first, second = distribute_dataset([even, uneven], make_layout(4))
    assert [leaf.is_global for leaf in first.values()] == [True, True]
    assert [leaf.is_global for leaf in second.values()] == [False, False]
    assert _locals(second["x"]) == [[0, 1], [2, 3], [4, 5], [6]]


def test_values_lie_on_their_replicas_and_empty_ones_keep_dtype_and_dims() -> None:
    layout = make_layout(4)
    (batch,) = distribute_dataset([np.ones((5, 3, 2), jnp.bfloat16)], layout)
    assert [v.shape for v in batch.values] == [(2, 3, 2), (2, 3, 2), (1, 3, 2), (0, 3, 2)]
    assert {v.dtype for v in batch.values} == {jnp.dtype(jnp.bfloat16)}
    assert [v.devices() for v in batch.values] == [{d} for d in layout.devices]


def test_values_lie_on_all_logical_devices_of_their_replica() -> None:
    layout = make_layout(4, 2)
    (batch,) = distribute_dataset([np.arange(7)], layout)
    assert _locals(batch) == [[0, 1], [2, 3], [4, 5], [6]]
    for value, devices in zip(batch.values, layout.device_grid, strict=True):
        assert value.devices() == set(devices)
        assert value.is_fully_replicated


def test_values_stay_on_the_host_where_the_options_say_so() -> None:
    options = InputOptions(experimental_fetch_to_device=False)
    (batch,) = distribute_dataset(
        [{"x": np.arange(5), "k": jnp.arange(5)}], make_layout(4), options
    )
    for leaf in batch.values():
        assert [type(v) for v in leaf.values] == [np.ndarray] * 4
        assert _locals(leaf) == [[0, 1], [2, 3], [4], []]


def test_dtypes_become_those_that_jax_gives_them_in_uneven_batches_too() -> None:
    for options in (InputOptions(True), InputOptions(False)):
        (batch,) = distribute_dataset([np.arange(5.0)], make_layout(4), options)
        assert {v.dtype for v in batch.values} == {np.dtype(np.float32)}


def test_jax_arrays_and_typed_keys_are_split_unevenly() -> None:
    keys = jax.random.split(jax.random.key(0), 5)
    layout = make_layout(4)
    (batch,) = distribute_dataset([{"k": keys, "x": jnp.arange(5.0)}], layout)
    assert [v.shape for v in batch["k"].values] == [(2,), (2,), (1,), (0,)]
    held = np.concatenate([jax.random.key_data(v) for v in batch["k"].values])
    np.testing.assert_array_equal(held, jax.random.key_data(keys))
    assert [v.devices() for v in batch["x"].values] == [{d} for d in layout.devices]


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_a_source_that_reuses_one_buffer_does_not_change_earlier_uneven_batches(depth: int) -> None:
    buffer = np.zeros((1026, 64), np.float32)

    def source() -> Any:
        for i in range(4):
            buffer[:] = i
            yield buffer

    options = InputOptions(experimental_per_replica_buffer_size=depth)
    given = list(distribute_dataset(source, make_layout(4), options))
    buffer[:] = -1
    for i, batch in enumerate(given):
        assert not batch.is_global
        for value in batch.values:
            assert (np.array(value) == i).all()


def test_element_spec_of_an_uneven_batch_is_that_of_replica_0() -> None:
    data = distribute_dataset([np.zeros((5, 2), np.float32)], make_layout(4))
    assert data.element_spec == jax.ShapeDtypeStruct((2, 2), np.float32)


# What a strategy makes of them


def test_uneven_batches_are_reduced_gathered_and_taken_apart() -> None:
    strategy = jaxdist.MirroredStrategy([f"cpu:{i}" for i in range(4)])
    x = np.random.default_rng(0).normal(size=(10, 3)).astype(np.float32)
    data = strategy.experimental_distribute_dataset(batches(x, 7))
    given = list(data)
    for batch, rows in zip(given, [x[:7], x[7:]], strict=True):
        np.testing.assert_array_equal(strategy.gather(batch, axis=0), rows)
        total = strategy.reduce("SUM", batch, axis=0)
        np.testing.assert_allclose(total, rows.sum(0), rtol=1e-5)
        mean = strategy.reduce("MEAN", batch, axis=0)
        np.testing.assert_allclose(mean, rows.mean(0), rtol=1e-5)
    sizes = [[len(v) for v in strategy.experimental_local_results(b)] for b in given]
    assert sizes == [[2, 2, 2, 1], [1, 1, 1, 0]]


# Datasets made by a function


def test_the_last_batch_of_a_function_is_shorter() -> None:
    data = distribute_datasets_from_function(lambda _: batches(np.arange(7), 2), make_layout(2))
    assert [_locals(b) for b in data] == [[[0, 1], [2, 3]], [[4, 5], [6]]]
    assert data.cardinality == 2


def test_replicas_for_which_nothing_is_left_get_no_rows() -> None:
    data = distribute_datasets_from_function(lambda _: batches(np.arange(11), 2), make_layout(4))
    assert [_locals(b) for b in data] == [
        [[0, 1], [2, 3], [4, 5], [6, 7]],
        [[8, 9], [10], [], []],
    ]
    assert data.cardinality == 2


def test_an_even_group_that_is_not_full_has_empty_elements_of_the_same_dims() -> None:
    layout = make_layout(4)
    elements = [{"x": np.ones((2, 3), np.int8), "s": np.float32(7)}]
    (batch,) = distribute_datasets_from_function(lambda _: elements, layout)
    assert [v.shape for v in batch["x"].values] == [(2, 3), (0, 3), (0, 3), (0, 3)]
    assert {v.dtype for v in batch["x"].values} == {np.dtype(np.int8)}
    assert _locals(batch["s"]) == [7.0, 0.0, 0.0, 0.0]
    assert not batch["s"].is_global
    assert [v.devices() for v in batch["x"].values] == [{d} for d in layout.devices]


def test_scalars_of_replicas_for_which_nothing_is_left_are_0_and_none_is_dropped() -> None:
    data = distribute_datasets_from_function(lambda _: range(6), make_layout(4))
    assert [_locals(b) for b in data] == [[0, 1, 2, 3], [4, 5, 0, 0]]


def test_typed_keys_of_replicas_for_which_nothing_is_left_are_empty() -> None:
    keys = jax.random.split(jax.random.key(0), 2)
    elements = [{"rows": keys, "one": keys[0]}]
    (batch,) = distribute_datasets_from_function(lambda _: elements, make_layout(2))
    assert [v.shape for v in batch["rows"].values] == [(2,), (0,)]
    assert [v.shape for v in batch["one"].values] == [(), ()]
    assert {v.dtype for v in batch["rows"].values} == {keys.dtype}


def test_elements_of_one_step_may_have_any_shapes() -> None:
    elements = [np.zeros((2, 3)), np.zeros((1, 5))]
    (batch,) = distribute_datasets_from_function(lambda _: elements, make_layout(2))
    assert [v.shape for v in batch.values] == [(2, 3), (1, 5)]


def test_datasets_of_different_lengths_go_on_until_the_longest_has_ended() -> None:
    def dataset_fn(context: InputContext) -> Any:
        return batches(np.arange(1 + 2 * context.input_pipeline_id), 2)

    options = InputOptions(experimental_replication_mode=InputReplicationMode.PER_REPLICA)
    data = distribute_datasets_from_function(dataset_fn, make_layout(4), options)
    assert [_locals(b) for b in data] == [
        [[0], [0, 1], [0, 1], [0, 1]],
        [[], [2], [2, 3], [2, 3]],
        [[], [], [4], [4, 5]],
        [[], [], [], [6]],
    ]
    assert data.cardinality == 4


@pytest.mark.parametrize("fetch", [True, False])
def test_a_reused_buffer_of_a_function_does_not_change_uneven_batches(fetch: bool) -> None:
    buffer = np.zeros((512, 16), np.float32)

    def source() -> Any:
        for i in range(7):
            buffer[:] = i
            yield buffer

    given = list(
        distribute_datasets_from_function(lambda _: source, make_layout(4), InputOptions(fetch))
    )
    buffer[:] = -1
    held = [np.array(v) for batch in given for v in batch.values if len(v)]
    assert [(x.min(), x.max()) for x in held] == [(i, i) for i in range(7)]
