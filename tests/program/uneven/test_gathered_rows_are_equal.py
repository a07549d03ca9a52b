"""Rows that an uneven step gathers are the same on all replicas, also beside arrays in pieces."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdist
from jaxdist import partition
from jaxdist.errors import UnevenMeanWarning

W = np.arange(1, 36, dtype="float32").reshape(5, 7) / 10
ROWS = {"uneven": 7, "without rows": 3}


def make_strategy(count: int) -> jaxdist.MirroredStrategy:
    return jaxdist.MirroredStrategy([f"cpu:{i}" for i in range(count)])


def distribute(strategy: Any, rows: int) -> Any:
    x = np.random.default_rng(0).normal(size=(rows, 5)).astype("float32")
    [batch] = list(strategy.experimental_distribute_dataset([x]))
    return batch


def in_pieces(strategy: Any, tree: Any) -> Any:
    rules = partition.Rules({"**": partition.Shard(0, pad=True)})
    return tree if strategy.num_replicas_in_sync == 1 else partition.place(strategy, tree, rules)


def gather(x: Any) -> Any:
    return jaxdist.get_replica_context().all_gather(x, axis=0)


def scale_by_number() -> optax.GradientTransformationExtraArgs:
    """Scale updates by a number that the caller gives, as a line search does by its loss."""

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        # A product of arrays, which a replica computes of its piece.
        number = extra["number"]
        return jax.tree.map(lambda g: g * jnp.broadcast_to(number, g.shape), updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


@pytest.mark.both_executors
@pytest.mark.parametrize("rows", ROWS)
def test_sharded_update_takes_what_is_computed_of_gathered_rows(rows: str) -> None:
    def train(strategy: Any, tx: Any) -> Any:
        def step(params: Any, state: Any, x: Any) -> Any:
            number = jnp.sum(gather(x) ** 2)
            grads = jax.grad(lambda p: jnp.sum(jnp.tanh(x @ p["w"])))(params)
            updates, state = tx.update(grads, state, params, number=number)
            return optax.apply_updates(params, updates), state

        with strategy.scope():
            params = {"w": jnp.asarray(W)}
            state = tx.init(params)
        return strategy.run(step, (params, state, distribute(strategy, ROWS[rows])))[0]["w"]

    # The moments are in pieces, which are proved in the trace of each group.
    tx = optax.chain(scale_by_number(), optax.trace(0.9))
    wanted = train(make_strategy(1), tx)
    found = train(make_strategy(4), jaxdist.sharded_update(tx, reduce_op="sum", min_bytes=0))
    np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.both_executors
@pytest.mark.parametrize("rows", ROWS)
def test_pieces_are_put_together_with_what_is_computed_of_gathered_rows(rows: str) -> None:
    def train(strategy: Any) -> Any:
        def step(params: Any, x: Any) -> Any:
            number = jnp.mean(gather(x))
            return jax.tree.map(lambda w: jnp.sqrt(w) * number, params)

        params = in_pieces(strategy, {"w": W})
        return strategy.run(step, (params, distribute(strategy, ROWS[rows])))["w"]

    found = train(make_strategy(4))
    np.testing.assert_allclose(np.asarray(found), train(make_strategy(1)), rtol=1e-5)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("of", ["gathered rows", "own rows"])
def test_the_mean_of_gradients_warns_only_where_replicas_have_a_loss_of_their_own(
    rows: str, of: str
) -> None:
    strategy = make_strategy(4)

    def step(params: Any, x: Any) -> Any:
        used = gather(x) if of == "gathered rows" else x

        def loss(p: Any) -> jax.Array:
            return jnp.sum(jnp.tanh(used @ partition.gather(p)["w"]))

        grads = jax.grad(loss)(params)
        return jaxdist.get_replica_context().all_reduce("mean", grads)

    params, x = in_pieces(strategy, {"w": W}), distribute(strategy, ROWS[rows])
    if of == "own rows":
        with pytest.warns(UnevenMeanWarning):
            strategy.run(step, (params, x))
        return
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnevenMeanWarning)
        found = strategy.run(step, (params, x))["w"]
    one = make_strategy(1)
    wanted = one.run(step, ({"w": W}, distribute(one, ROWS[rows])))["w"]
    np.testing.assert_allclose(np.asarray(found), wanted, rtol=1e-5)
