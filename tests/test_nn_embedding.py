"""Rows of a sharded table: those of the whole table, by whichever exchange sends less."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxdist
from jaxdist import partition
from jaxdist.errors import ArgumentError, ArgumentTypeError, UnevenMeanWarning
from jaxdist.nn import embedding_lookup
from jaxdist.partition import Replicate, Shard, Split
from tests.partition.test_rules import grid, mesh
from tests.strategies.oracle import refused

TABLE = np.random.default_rng(0).normal(size=(96, 24)).astype("float32")
# Negative ids, 96 and 200 are not rows.
IDS = np.random.default_rng(1).integers(-3, 97, size=(8, 5))
IDS[3, 2] = 200
VALID = np.abs(IDS) % 96
WEIGHTS = np.random.default_rng(2).normal(size=(8, 5, 24)).astype("float32")


def _two() -> jaxdist.Strategy:
    return jaxdist.MirroredStrategy(mesh=mesh((2, 4), ("a", "b")), replica_axes=("a", "b"))


# The strategy, the placement, and whether rows are exchanged in place of the table.
LAYOUTS: dict[str, tuple[Any, Any, bool]] = {
    "width": (jaxdist.MirroredStrategy, Shard(1), True),
    "width over two axes": (_two, Shard(1), True),
    "width over one of two axes": (_two, Shard(1, axes=("b",)), True),
    "width and rows over logical devices": (lambda: grid(4, 2), Shard(1, 0), True),
    "rows": (jaxdist.MirroredStrategy, Shard(0), False),
    "rows and width over logical devices": (lambda: grid(4, 2), Shard(0, 1), False),
    "split": (lambda: grid(4, 2), Split(1), False),
    "whole": (jaxdist.MirroredStrategy, Replicate(), False),
}


def _cut(strategy: jaxdist.Strategy, array: np.ndarray) -> Any:
    parts = np.split(array, strategy.num_replicas_in_sync)
    return strategy.experimental_distribute_values_from_function(
        lambda context: parts[context.replica_id_in_sync_group]
    )


def _weigh(rows: jax.Array, weights: Any) -> jax.Array:
    return jnp.sum(jnp.where(jnp.isnan(rows), 0, rows).astype(jnp.float32) ** 2 * weights)


def _step(p: Any, ids: jax.Array, weights: jax.Array, dtype: Any = None) -> Any:
    def loss(p: Any) -> tuple[jax.Array, jax.Array]:
        rows = embedding_lookup(p["t"], ids, dtype=dtype)
        return _weigh(rows, weights), rows

    grads, rows = jax.grad(loss, has_aux=True)(p)
    return rows, jaxdist.get_replica_context().all_reduce("mean", grads)


def _take(table: jax.Array, ids: np.ndarray) -> jax.Array:
    """The rows, by NumPy's rules: those that the table does not have are nan."""
    known = (ids >= 0) & (ids < len(table))
    rows = table[np.where(known, ids, 0)]
    return jnp.where(known.reshape(known.shape + (1,) * (rows.ndim - known.ndim)), rows, jnp.nan)


def _on_one_device(
    table: np.ndarray, count: int, dtype: Any = None, ids: np.ndarray = IDS
) -> tuple[Any, Any]:
    def loss(table: jax.Array) -> jax.Array:
        low = table if dtype is None else table.astype(dtype)
        return _weigh(_take(low, ids), WEIGHTS[..., : table.shape[1]]) / count

    low = jnp.asarray(table, dtype)
    return np.asarray(_take(low, ids)), np.asarray(jax.grad(loss)(jnp.asarray(table)))


def _run(name: str, dtype: Any = None) -> tuple[Any, Any, list[str]]:
    make, placement, _ = LAYOUTS[name]
    strategy = make()
    placed = partition.place(strategy, {"t": TABLE}, {"*": placement})
    given = (placed, _cut(strategy, IDS), _cut(strategy, WEIGHTS))

    def step(p: Any, ids: jax.Array, weights: jax.Array) -> Any:
        return _step(p, ids, weights, dtype)

    rows, grads = strategy.run(step, given)
    kinds = [c.kind for c in strategy.lower(step, given).traced_collectives]
    whole = np.concatenate([np.asarray(r) for r in strategy.experimental_local_results(rows)])
    return whole, np.asarray(grads["t"]), kinds


@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_and_their_gradient_are_those_of_the_whole_table(name: str) -> None:
    rows, grad, kinds = _run(name)
    expected, expected_grad = _on_one_device(TABLE, LAYOUTS[name][0]().num_replicas_in_sync)
    np.testing.assert_array_equal(rows, expected)
    np.testing.assert_allclose(grad, expected_grad, rtol=1e-5, atol=1e-6)
    assert kinds.count("all_to_all") == (2 if LAYOUTS[name][2] else 0), kinds
    # The ids of all replicas, and never the table beside its rows.
    assert kinds.count("all_gather") == int(isinstance(LAYOUTS[name][1], Shard)), kinds


@pytest.mark.parametrize("name", ["width", "rows", "split"])
def test_rows_in_bfloat16_are_those_of_the_table_in_bfloat16(name: str) -> None:
    rows, grad, _ = _run(name, jnp.bfloat16)
    count = LAYOUTS[name][0]().num_replicas_in_sync
    expected, expected_grad = _on_one_device(TABLE, count, jnp.bfloat16)
    assert rows.dtype == jnp.bfloat16
    np.testing.assert_array_equal(rows.astype("float32"), expected.astype("float32"))
    assert grad.dtype == np.float32
    np.testing.assert_allclose(grad, expected_grad, atol=2**-7 * np.abs(expected_grad).max())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["width", "width over two axes", "rows"])
def test_op_by_op_the_rows_and_their_gradient_are_the_same(name: str) -> None:
    with jaxdist.config.run_eagerly(True):
        make, placement, _ = LAYOUTS[name]
        strategy = make()
        placed = partition.place(strategy, {"t": TABLE}, {"*": placement})
        given = (placed, _cut(strategy, VALID), _cut(strategy, WEIGHTS))
        rows, grads = strategy.run(_step, given)
    expected, expected_grad = _on_one_device(TABLE, strategy.num_replicas_in_sync, None, VALID)
    found = [np.asarray(r) for r in strategy.experimental_local_results(rows)]
    np.testing.assert_array_equal(np.concatenate(found), expected)
    np.testing.assert_allclose(np.asarray(grads["t"]), expected_grad, rtol=1e-5, atol=1e-6)


@settings(max_examples=10, deadline=None)
@given(
    rows=st.integers(1, 40),
    width=st.integers(1, 24),
    tail=st.sampled_from([(), (3,)]),
    shape=st.sampled_from([(), (1,), (4,), (2, 3)]),
    seed=st.integers(0, 2**31),
)
def test_any_table_and_ids_give_the_rows_of_the_table(
    rows: int, width: int, tail: tuple[int, ...], shape: tuple[int, ...], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    table = rng.normal(size=(rows, width, *tail)).astype("float32")
    ids = rng.integers(-rows - 2, rows + 2, size=(4, *shape))
    strategy = jaxdist.MirroredStrategy([f"cpu:{n}" for n in range(4)])
    placed = partition.place(strategy, {"t": table}, {"*": Shard(1, pad=True)})
    own = strategy.experimental_distribute_values_from_function(
        lambda context: ids[context.replica_id_in_sync_group]
    )
    found = strategy.run(lambda p, ids: embedding_lookup(p["t"], ids), (placed, own))
    for replica, value in enumerate(strategy.experimental_local_results(found)):
        np.testing.assert_array_equal(value, _take(jnp.asarray(table), ids[replica]))


def test_many_ids_gather_the_table_once() -> None:
    strategy = jaxdist.MirroredStrategy()
    placed = partition.place(strategy, {"t": TABLE}, {"*": Shard(1)})

    def count(ids_of_a_replica: int) -> list[str]:
        ids = jax.device_put(
            np.zeros((8 * ids_of_a_replica,), "int32"), strategy.per_replica_sharding
        )
        program = strategy.lower(lambda p, i: embedding_lookup(p["t"], i).sum(), (placed, ids))
        return [c.kind for c in program.traced_collectives]

    # A device sends 7/8 of 96 rows for a gather of the table, and again for the gradient. For n ids
    # it sends 7/8 of n rows of 96 bytes, as often, and n ids of 4 bytes to 7 others.
    assert count(71) == ["all_gather", "all_to_all"]
    assert count(97) == ["all_gather"]


def test_replicas_with_different_numbers_of_ids_gather_the_table() -> None:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    placed = partition.place(strategy, {"t": TABLE}, {"*": Shard(1)})
    parts = [IDS[:3], IDS[3:]]
    ids, weights = (
        strategy.experimental_distribute_values_from_function(
            lambda context, p=p: p[context.replica_id_in_sync_group]
        )
        for p in (parts, [WEIGHTS[:3], WEIGHTS[3:]])
    )
    # The loss is a sum over examples, so half of the sum over replicas is what is meant.
    with pytest.warns(UnevenMeanWarning):
        rows, grads = strategy.run(_step, (placed, ids, weights))
    expected, expected_grad = _on_one_device(TABLE, 2)
    found = [np.asarray(r) for r in strategy.experimental_local_results(rows)]
    np.testing.assert_array_equal(np.concatenate(found), expected)
    np.testing.assert_allclose(np.asarray(grads["t"]), expected_grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["width", "rows"])
def test_a_gradient_of_a_gradient_is_that_of_one_device(name: str) -> None:
    strategy = jaxdist.MirroredStrategy()
    placed = partition.place(strategy, {"t": TABLE}, {"*": LAYOUTS[name][1]})

    def penalty(p: Any, ids: Any, weights: Any, mean: Any) -> Any:
        def loss(p: Any) -> jax.Array:
            return jnp.sum(jnp.sin(embedding_lookup(p["t"], ids)) * weights)

        grads = mean(jax.grad(loss)(p))
        return jnp.sum(partition.gather(grads)["t"] ** 2)

    def step(p: Any, ids: Any, weights: Any) -> Any:
        def mean(tree: Any) -> Any:
            return jaxdist.get_replica_context().all_reduce("mean", tree)

        return mean(jax.grad(lambda p: penalty(p, ids, weights, mean))(p))

    found = strategy.run(step, (placed, _cut(strategy, VALID), _cut(strategy, WEIGHTS)))
    expected = jax.grad(lambda p: penalty(p, VALID, WEIGHTS / 8, lambda tree: tree))(
        {"t": jnp.asarray(TABLE)}
    )
    np.testing.assert_allclose(np.asarray(found["t"]), expected["t"], rtol=1e-4, atol=1e-5)


def test_outside_of_a_step_and_of_plain_arrays_it_is_jax_numpy() -> None:
    strategy = jaxdist.MirroredStrategy()
    placed = partition.place(strategy, {"t": TABLE}, {"*": Shard(1)})["t"]
    for table in (placed, nnx.Param(placed), TABLE, nnx.Param(jnp.asarray(TABLE))):
        rows = embedding_lookup(table, [1, 2], dtype="bfloat16")
        np.testing.assert_array_equal(rows, TABLE[1:3].astype(jnp.bfloat16))
    for table in (np.arange(4), jaxdist.Variable(jnp.arange(4))):
        np.testing.assert_array_equal(embedding_lookup(table, [2], dtype="bfloat16"), [2])


def test_wrong_arguments_are_named() -> None:
    placed = partition.place(jaxdist.MirroredStrategy(), {"t": TABLE}, {"*": Shard(1)})["t"]
    for table in (TABLE, placed):
        with refused(ArgumentTypeError, "nn.embedding_lookup was given ids of dtype float32"):
            embedding_lookup(table, [1.0])
        with refused(ArgumentError, "ids with the row 96", "from 0 to 95"):
            embedding_lookup(table, [96])
        with refused(ArgumentTypeError, "nn.embedding_lookup was given dtype", "bfloat16"):
            embedding_lookup(table, [1], dtype="int32")


@pytest.mark.parametrize(
    ("name", "count", "is_exchanged"),
    [
        ("v5e:4x4", 256, True),
        ("v5e:4x4*2", 256, True),
        # Fewer bytes than the table in all, but more between the slices.
        ("v5e:4x4", 512, True),
        ("v5e:4x4*2", 512, False),
    ],
)
def test_between_slices_rows_are_exchanged_where_less_crosses_the_network(
    name: str, count: int, is_exchanged: bool
) -> None:
    pytest.importorskip("libtpu")
    strategy = jaxdist.TPUStrategy(jaxdist.cluster_resolver.TPUClusterResolver(f"described:{name}"))
    table = {"embedding": jax.ShapeDtypeStruct((4096, 1024), "float32")}
    placed = partition.place(strategy, table, partition.fsdp(min_bytes=0))
    rows = strategy.num_replicas_in_sync * count
    ids = jax.ShapeDtypeStruct((rows,), "int32", sharding=strategy.per_replica_sharding)
    program = strategy.lower(lambda t, i: embedding_lookup(t["embedding"], i), (placed, ids))
    kinds = [c.kind for c in program.traced_collectives]
    assert kinds == ["all_gather", "all_to_all"][: 1 + is_exchanged]
