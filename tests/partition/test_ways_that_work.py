"""What cannot be done with parameters in pieces names what works instead, and that works."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxdist
from jaxdist import get_replica_context, partition
from jaxdist.errors import DivergentCollectiveError, ReplicaValueError, ShardedArrayError

X = np.arange(32, dtype=np.float32).reshape(8, 4) / 8


@pytest.fixture(params=[False, True], ids=["compiled", "op by op"])
def strategy(request: pytest.FixtureRequest) -> Any:
    jaxdist.config.run_eagerly(request.param)
    yield jaxdist.MirroredStrategy([f"cpu:{i}" for i in range(4)])
    jaxdist.config.run_eagerly(False)


def _rows(strategy: Any) -> Any:
    return jax.device_put(X, strategy.per_replica_sharding)


def _while(layer: Any, x: Any) -> Any:
    return jax.lax.while_loop(lambda x: x.sum() < 20, lambda x: x + jnp.abs(layer(x)) + 1, x)


def _cond(layer: Any, x: Any) -> Any:
    return jax.lax.cond(x.sum() > 15, lambda x: layer(x), lambda x: x, x)


def _fori(layer: Any, x: Any) -> Any:
    turns = jnp.maximum(x.sum(), 0).astype(int)
    return jax.lax.fori_loop(0, turns, lambda _, x: jnp.tanh(layer(x)), x)


@pytest.mark.parametrize("use", [_while, _cond, _fori])
def test_a_parameter_in_a_loop_of_the_rows_is_gathered_before(
    strategy: Any, use: Callable[[Any, Any], Any]
) -> None:
    layer = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    expected = np.concatenate([use(layer, jnp.asarray(x)) for x in np.split(X, 4)])
    partition.place(strategy, layer, partition.fsdp(min_bytes=0))
    with pytest.raises(DivergentCollectiveError, match=r"partition\.gather\(model\)") as caught:
        strategy.run(use, (layer, _rows(strategy)))
    assert "test_ways_that_work.py" in str(caught.value)
    got = strategy.run(lambda layer, x: use(partition.gather(layer), x), (layer, _rows(strategy)))
    np.testing.assert_allclose(got.array, expected, rtol=1e-4)


def test_a_parameter_in_a_map_of_uneven_rows_is_gathered_before(strategy: Any) -> None:
    layer = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    expected = layer(jnp.asarray(X[:6]))
    partition.place(strategy, layer, partition.fsdp(min_bytes=0))
    rows = jaxdist.PerReplica([X[:3], X[3:4], X[4:5], X[5:6]])
    with pytest.raises(DivergentCollectiveError, match=r"partition\.gather\(model\)"):
        strategy.run(lambda m, x: jax.lax.map(m, x), (layer, rows))

    def step(layer: Any, x: Any) -> Any:
        whole = partition.gather(layer)
        return jax.lax.map(whole, x), jax.vmap(layer)(x)

    for got in strategy.run(step, (layer, rows)):
        np.testing.assert_allclose(np.concatenate(got.values), expected, rtol=1e-5)


def _combine(*trees: Any) -> Any:
    """Merge pytrees. Where one has a leaf, the others have None, as in Equinox."""

    def first(*leaves: Any) -> Any:
        return next((leaf for leaf in leaves if leaf is not None), None)

    return jax.tree.map(first, *trees, is_leaf=lambda x: x is None)


def test_a_tree_of_pieces_and_one_with_none_in_their_places(strategy: Any) -> None:
    params = {"w": jnp.ones((4, 4)), "activation": None}
    static = {"w": None, "activation": jnp.tanh}
    placed = partition.place(strategy, params, partition.fsdp(min_bytes=0))

    def loss(model: Any, x: Any) -> Any:
        return jnp.mean(model["activation"](x @ model["w"]) ** 2)

    def make(join: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
        def step(params: Any, x: Any) -> Any:
            found = jax.value_and_grad(lambda p: loss(join(p), x))(params)
            return get_replica_context().all_reduce("mean", found)

        return step

    with pytest.raises(ReplicaValueError, match=r"partition\.gather\(tree\)") as caught:
        strategy.run(make(lambda p: _combine(p, static)), (placed, _rows(strategy)))
    assert "optimizer" not in str(caught.value)
    expected = jax.value_and_grad(lambda p: loss(_combine(p, static), X))(params)
    for join in (
        lambda p: _combine(static, p),
        lambda p: _combine(partition.gather(p), static),
    ):
        value, grads = strategy.run(make(join), (placed, _rows(strategy)))
        np.testing.assert_allclose(value, expected[0], rtol=1e-5)
        assert isinstance(grads["w"], jaxdist.Sharded)
        np.testing.assert_allclose(grads["w"].whole(), expected[1]["w"], rtol=1e-4)


def test_gradients_of_an_equinox_model(strategy: Any) -> None:
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(4, 3, 8, 1, key=jax.random.key(0))

    def loss(model: Any, x: Any) -> Any:
        return jnp.mean(jax.vmap(model)(x) ** 2)

    expected, gradient = eqx.filter_value_and_grad(loss)(model, X)
    params, static = eqx.partition(model, eqx.is_array)
    params = partition.place(strategy, params, partition.fsdp(min_bytes=0))

    def refused(params: Any, x: Any) -> Any:
        return eqx.filter_value_and_grad(loss)(eqx.combine(static, params), x)[0]

    with pytest.raises(ReplicaValueError, match=r"partition\.gather\(tree\)"):
        strategy.run(refused, (params, _rows(strategy)))

    def step(params: Any, x: Any) -> Any:
        found = jax.value_and_grad(lambda p: loss(eqx.combine(static, p), x))(params)
        return get_replica_context().all_reduce("mean", found)

    value, grads = strategy.run(step, (params, _rows(strategy)))
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    wanted = jax.tree.leaves(eqx.filter(gradient, eqx.is_array))
    for got, own in zip(jax.tree.leaves(jax.tree.map(jnp.asarray, grads)), wanted, strict=True):
        np.testing.assert_allclose(got, own, rtol=1e-4, atol=1e-6)


def test_the_remedy_is_that_of_optimizers_in_optimizers_only(strategy: Any) -> None:
    w = partition.place(strategy, jnp.ones((4, 4)), partition.fsdp(min_bytes=0))

    def own(w: Any) -> Any:
        return jax.tree.map(lambda w: w * jnp.linalg.norm(w), w)

    # JAX compiles a norm by itself, so it may also be one of an optimizer.
    with pytest.raises(ShardedArrayError, match=r"partition\.gather\(tree\)"):
        strategy.run(own, (w,))
    with pytest.raises(ShardedArrayError, match=r"partition\.gather\(tree\)") as caught:
        strategy.run(lambda w: jax.tree.map(lambda w: w * w.sum(), w), (w,))
    assert "sharded_update(tx)" not in str(caught.value)

    def clipped(w: Any) -> Any:
        tx = optax.clip_by_global_norm(1.0)
        return tx.update(w, tx.init(w))[0]

    with pytest.raises(ShardedArrayError, match=r"jaxdist\.sharded_update\(tx\)"):
        strategy.run(clipped, (w,))
