"""Flags and counts of arrays in pieces are those of the arrays, the same on all replicas."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxdist
from jaxdist import Sharded, partition
from jaxdist.errors import DivergentCollectiveError

STEPS = 3


def make_strategy(layout: str) -> Any:
    if layout == "one device":
        return jaxdist.MirroredStrategy(["cpu:0"])
    if layout == "fsdp":
        return jaxdist.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])
    mesh = jax.make_mesh((2, 2), ("slice", "data"), devices=jax.devices()[:4])
    return jaxdist.MirroredStrategy(mesh=mesh, replica_axes=("slice", "data"))


def place(strategy: Any, layout: str, tree: Any, dim: int = 0) -> Any:
    if layout == "one device":
        return tree
    cut = partition.Shard(dim, axes=("data",) if layout == "hsdp" else None, pad=True)
    return partition.place(strategy, tree, partition.Rules([("**", cut)], must_match=False))


@pytest.mark.both_executors
@pytest.mark.parametrize("layout", ["fsdp", "hsdp"])
@pytest.mark.parametrize("dim", [0, 1])
def test_flags_and_counts_are_those_of_the_array_without_its_padding(layout: str, dim: int) -> None:
    strategy = make_strategy(layout)
    array = np.arange(1, 36, dtype="float32").reshape(5, 7)
    # The padding is zero: `any` of what is equal to zero, and `all` of what is not, would see it.
    arrays = [array, np.where(array == 35, 0, array), np.where(array == 1, 0, array), 0 * array]

    def reduced(w: Any, of: Any) -> list[Any]:
        made = []
        # Over the other dim alone the results are in pieces themselves.
        for over in (None, dim, (0, 1)):
            made += [fn(w == 0, axis=over) for fn in (of.any, of.max, of.sum, of.count_nonzero)]
            made += [fn(w != 0, axis=over) for fn in (of.all, of.min)]
            made += [fn(w.astype("int32") + 9, axis=over) for fn in (of.sum, of.min)]
            made.append(of.max((w - 50).astype("int32"), axis=over))
        return made

    placed = place(strategy, layout, arrays, dim)
    found = strategy.run(lambda tree: [reduced(w, jnp) for w in jax.tree.leaves(tree)], (placed,))
    for own, array in zip(found, arrays, strict=True):
        for result, wanted in zip(own, reduced(array, np), strict=True):
            assert not isinstance(result, jaxdist.PerReplica)
            np.testing.assert_array_equal(result, wanted)


def make_tx(name: str) -> Any:
    adam = optax.adam(0.1)
    if name == "zero_nans":
        return optax.chain(optax.zero_nans(), adam)
    if name == "apply_if_finite":
        return optax.apply_if_finite(adam, 5)
    steps = optax.MultiSteps(adam, 1, should_skip_update_fn=optax.skip_not_finite)
    return steps.gradient_transformation()


def train(name: str, layout: str, is_placed_first: bool) -> Any:
    """Return parameters and state after each step; the second step has nan in one gradient."""
    strategy, tx = make_strategy(layout), make_tx(name)
    params: Any = {"w": np.arange(35, dtype="float32").reshape(5, 7), "b": np.ones(4, "float32")}

    def step(params: Any, state: Any, scale: jax.Array) -> Any:
        def loss(p: Any) -> jax.Array:
            whole = partition.gather(p)
            return jnp.mean(scale) * jnp.sum(whole["w"][4] ** 2) + jnp.sum(whole["b"])

        grads = jaxdist.get_replica_context().all_reduce("mean", jax.grad(loss)(params))
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    with strategy.scope():
        if is_placed_first:
            params = place(strategy, layout, params)
            state = tx.init(params)
        else:
            params, state = place(strategy, layout, (params, tx.init(params)))
    after = []
    for number in range(STEPS):
        scale = np.ones(12, "float32")
        scale[7] = np.nan if number == 1 else 2
        scale = jax.device_put(scale, strategy.per_replica_sharding)
        params, state = strategy.run(step, (params, state, scale))
        after.append((params, state))
    return after


@pytest.mark.parametrize("name", ["zero_nans", "apply_if_finite", "skip_not_finite"])
@pytest.mark.parametrize("layout", ["fsdp", pytest.param("hsdp", marks=pytest.mark.long)])
@pytest.mark.parametrize("is_placed_first", [False, True], ids=["state_first", "placed_first"])
def test_what_looks_for_nan_trains_on_pieces_as_on_one_device(
    name: str, layout: str, is_placed_first: bool
) -> None:
    wanted = train(name, "one device", is_placed_first)
    found = train(name, layout, is_placed_first)

    def is_sharded(x: Any) -> bool:
        return isinstance(x, Sharded)

    for one, other in zip(wanted, found, strict=True):
        # The same pytrees: a flag for each parameter is an array as it is there.
        whole = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), other, is_leaf=is_sharded)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), whole, one)
    if name == "zero_nans":
        flags = [s[0].found_nan for _, s in found]
        assert [bool(f["w"]) for f in flags] == [False, True, False]
        assert not any(bool(f["b"]) for f in flags)


@pytest.mark.parametrize("is_placed_first", [False, True], ids=["optimizer_first", "placed_first"])
def test_an_nnx_optimizer_that_zeroes_nan_keeps_its_flags_whole(is_placed_first: bool) -> None:
    strategy = make_strategy("fsdp")
    with strategy.scope():
        model: Any = nnx.Linear(7, 3, rngs=nnx.Rngs(0))
        if is_placed_first:
            model = place(strategy, "fsdp", model)
        optimizer = nnx.Optimizer(model, make_tx("zero_nans"), wrt=nnx.Param)
        if not is_placed_first:
            model, optimizer = place(strategy, "fsdp", (model, optimizer))

    def step(model: Any, optimizer: Any, x: jax.Array) -> None:
        grads = nnx.grad(lambda m: jnp.mean(m(x)))(model)
        optimizer.update(model, jaxdist.get_replica_context().all_reduce("mean", grads))

    x = np.ones((6, 7), "float32")
    x[5, 6] = np.nan
    strategy.run(step, (model, optimizer, jax.device_put(x, strategy.per_replica_sharding)))
    flags = optimizer.opt_state[0].found_nan
    assert [bool(flags["kernel"][...]), bool(flags["bias"][...])] == [True, False]


def test_a_flag_of_pieces_in_a_branch_that_some_replicas_do_not_take_is_refused() -> None:
    strategy = make_strategy("fsdp")
    placed = place(strategy, "fsdp", {"w": np.ones((5, 7), "float32")})
    x = jax.device_put(np.ones((3, 1), "float32"), strategy.per_replica_sharding)

    def step(tree: Any, x: jax.Array) -> Any:
        [w] = jax.tree.leaves(tree)
        return jax.lax.cond(x.sum() > 0, lambda: jnp.any(w > 0), lambda: jnp.array(False))

    with pytest.raises(DivergentCollectiveError, match="test_flags_of_pieces"):
        strategy.lower(step, (placed, x))
