"""A batch does not change when its source overwrites an array."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist import PerReplica
from jaxdist.data import (
    InputOptions,
    InputReplicationMode,
    batches,
    distribute_dataset,
    distribute_datasets_from_function,
)
from tests.aligned import allocate_aligned
from tests.layouts import make_layout

# (8,) is one number per device; the larger shares are aligned, as JAX needs them to be to take
# a buffer over without a copy.
SHAPES = [(8,), (64, 16), (512, 784)]


def _on_host(leaf: Any) -> np.ndarray:
    values = leaf.values if isinstance(leaf, PerReplica) else (leaf,)
    # A copy: `np.asarray` of a JAX array on CPU may be a view of the very buffer under test.
    return np.concatenate([np.array(v, copy=True) for v in values])


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("num_replicas", [1, 2, 8])
def test_a_source_that_reuses_one_buffer_does_not_change_earlier_batches(
    num_replicas: int, shape: tuple[int, ...], depth: int
) -> None:
    buffer = allocate_aligned(shape)

    def source() -> Iterator[np.ndarray]:
        for i in range(4):
            buffer[:] = i
            yield buffer

    options = InputOptions(experimental_per_replica_buffer_size=depth)
    given = list(distribute_dataset(source, make_layout(num_replicas), options))
    buffer[:] = -1
    for i, batch in enumerate(given):
        assert (_on_host(batch) == i).all()


@pytest.mark.parametrize("mode", InputReplicationMode)
@pytest.mark.parametrize("fetch", [True, False])
@pytest.mark.parametrize("num_replicas", [1, 2, 8])
def test_a_function_whose_dataset_reuses_one_buffer_gives_batches_of_their_own(
    num_replicas: int, fetch: bool, mode: InputReplicationMode
) -> None:
    buffer = allocate_aligned((64, 16))

    def source() -> Iterator[np.ndarray]:
        for i in range(2 * num_replicas):
            buffer[:] = i
            yield buffer

    options = InputOptions(fetch, mode)
    layout = make_layout(num_replicas)
    given = list(distribute_datasets_from_function(lambda _: source, layout, options))
    buffer[:] = -1
    held = [leaf for batch in given for leaf in getattr(batch, "values", (batch,))]
    # With a dataset for each replica, all of them give 0 first, then 1, and so on.
    repeats = num_replicas if mode is InputReplicationMode.PER_REPLICA else 1
    expected = [i for i in range(2 * num_replicas) for _ in range(repeats)]
    assert [(np.array(x).min(), np.array(x).max()) for x in held] == [(i, i) for i in expected]


def test_arrays_in_memory_can_be_overwritten_after_the_batch() -> None:
    x = allocate_aligned((512, 784))
    x[:] = 1
    batch = next(iter(distribute_dataset(batches(x, 512), make_layout(8))))
    x[:] = 2
    assert (_on_host(batch) == 1).all()


@pytest.mark.parametrize("num_replicas", [1, 8])
def test_batches_lie_in_the_per_replica_layout(num_replicas: int) -> None:
    layout = make_layout(num_replicas)
    batch = next(iter(distribute_dataset([np.zeros((16, 3), np.float32)], layout)))
    array = batch.array if isinstance(batch, PerReplica) else batch
    assert array.sharding == layout.per_replica


def test_logical_devices_of_one_replica_hold_the_same_rows() -> None:
    layout = make_layout(4, 2)
    batch = next(iter(distribute_dataset([np.arange(8)], layout)))
    held = {s.device: s.data.tolist() for s in batch.array.addressable_shards}
    for replica in range(4):
        first, second = layout.device_grid[replica]
        assert held[first] == held[second] == [2 * replica, 2 * replica + 1]


@pytest.mark.parametrize("num_replicas", [1, 4])
def test_jax_arrays_and_typed_keys_are_laid_out_over_the_replicas(num_replicas: int) -> None:
    keys = jax.random.split(jax.random.key(0), 4)
    layout = make_layout(num_replicas)
    batch = next(iter(distribute_dataset([{"k": keys, "x": jnp.arange(4.0)}], layout)))
    leaves = [v.array if isinstance(v, PerReplica) else v for v in batch.values()]
    assert all(leaf.sharding == layout.per_replica for leaf in leaves)
    assert (jax.random.key_data(leaves[0]) == jax.random.key_data(keys)).all()


def test_jax_arrays_from_a_function_go_to_their_replicas() -> None:
    layout = make_layout(4, 2)
    elements = [{"x": jnp.full((2,), i), "s": jnp.float32(i)} for i in range(4)]
    batch = next(iter(distribute_datasets_from_function(lambda _: elements, layout)))
    assert [v.tolist() for v in batch["x"].values] == [[i, i] for i in range(4)]
    assert [v.tolist() for v in batch["s"].values] == [0.0, 1.0, 2.0, 3.0]
    assert batch["x"].array.sharding == batch["s"].array.sharding == layout.per_replica


@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "uint16", "float16", "bfloat16", "float64", "int64", "complex128"]
)
def test_dtypes_become_those_that_jax_gives_them(dtype: str) -> None:
    x = np.arange(8).astype(jnp.dtype(dtype))
    batch = next(iter(distribute_dataset([x], make_layout(4))))
    assert batch.array.dtype == jnp.asarray(x).dtype
    assert (np.asarray(batch.array) == x).all()


def test_batches_stay_on_the_host_where_the_options_say_so() -> None:
    options = InputOptions(experimental_fetch_to_device=False)
    (batch,) = distribute_dataset([{"x": np.arange(8)}], make_layout(4), options)
    assert [type(v) for v in batch["x"].values] == [np.ndarray] * 4
    assert [v.tolist() for v in batch["x"].values] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    (alone,) = distribute_dataset([np.arange(8)], make_layout(1), options)
    assert type(alone) is np.ndarray


def test_scalars_of_a_function_stay_scalars_on_the_host() -> None:
    options = InputOptions(experimental_fetch_to_device=False)
    (batch,) = distribute_datasets_from_function(lambda _: range(4), make_layout(4), options)
    assert [(v.shape, int(v)) for v in batch.values] == [((), i) for i in range(4)]


def test_a_dataset_on_the_device_is_made_and_read_there() -> None:
    layout = make_layout(2)
    options = InputOptions(False, InputReplicationMode.PER_REPLICA, True)

    def dataset_fn(_: Any) -> Any:
        def source() -> Iterator[jax.Array]:
            x = jnp.zeros(3)
            yield jnp.full((3,), next(iter(x.devices())).id)

        return source

    (batch,) = distribute_datasets_from_function(dataset_fn, layout, options)
    ids = [d.id for d in layout.devices]
    assert [v.tolist() for v in batch.values] == [[i] * 3 for i in ids]


def test_the_source_runs_with_the_64_bit_setting_of_the_consumer() -> None:
    with jax.enable_x64(True):
        batch = next(iter(distribute_dataset([np.arange(8.0)], make_layout(4))))
        assert batch.array.dtype == np.float64
