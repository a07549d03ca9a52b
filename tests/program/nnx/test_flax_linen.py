"""Linen modules and `TrainState`: plain pytrees in, plain pytrees out."""

from typing import Any

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import jaxdist
from jaxdist import RunOptions, get_replica_context

_RNG = np.random.default_rng(0)
X = _RNG.normal(size=(16, 4)).astype(np.float32)
Y = _RNG.normal(size=(16, 2)).astype(np.float32)


class Net(linen.Module):
    """Dense, batch norm, dropout, dense."""

    rate: float = 0.0
    has_norm: bool = False

    @linen.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        x = jnp.tanh(linen.Dense(8)(x))
        if self.has_norm:
            x = linen.BatchNorm(use_running_average=not train, momentum=0.5)(x)
        x = linen.Dropout(self.rate, deterministic=not train)(x)
        y: jax.Array = linen.Dense(2)(x)
        return y


class StateWithStatistics(TrainState):
    """A `TrainState` that carries batch statistics."""

    batch_stats: Any


def _state(net: Net) -> Any:
    variables = net.init(jax.random.key(0), X, train=False)
    return StateWithStatistics.create(
        apply_fn=net.apply,
        params=variables["params"],
        batch_stats=variables.get("batch_stats", {}),
        tx=optax.adam(0.05),
    )


def _step(state: Any, batch: Any, key: Any) -> Any:
    context = get_replica_context()
    key = jax.random.fold_in(key, context.replica_id_in_sync_group)

    def loss_of(params: Any) -> Any:
        out, changed = state.apply_fn(
            {"params": params, "batch_stats": state.batch_stats},
            batch[0],
            train=True,
            mutable=["batch_stats"],
            rngs={"dropout": key},
        )
        return jnp.mean((out - batch[1]) ** 2), changed.get("batch_stats", {})

    (loss, stats), grads = jax.value_and_grad(loss_of, has_aux=True)(state.params)
    grads, stats, loss = context.all_reduce("mean", (grads, stats, loss))
    return state.apply_gradients(grads=grads, batch_stats=stats), loss


def _batch(strategy: Any) -> Any:
    return jax.device_put((X, Y), strategy.per_replica_sharding)


def _trained(strategy: Any, net: Net, num_steps: int = 4) -> Any:
    state, losses = _state(net), []
    for i in range(num_steps):
        state, loss = strategy.run(_step, (state, _batch(strategy), jax.random.key(i)))
        losses.append(float(loss))
    return state, losses


@pytest.mark.parametrize("donates", [False, True])
def test_a_train_state_trains_on_8_replicas_as_on_one_device(donates: bool) -> None:
    many, one = jaxdist.MirroredStrategy(), jaxdist.OneDeviceStrategy("cpu:0")
    net = Net()
    ours, theirs = _state(net), _state(net)
    options = RunOptions(donate_argnums=(0,)) if donates else None
    for i in range(4):
        key = jax.random.key(i)
        ours, _ = many.run(_step, (ours, _batch(many), key), options=options)
        theirs, _ = one.run(_step, (theirs, (X, Y), key))
    assert type(ours) is StateWithStatistics
    assert int(ours.step) == 4
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5),
        ours.params,
        theirs.params,
    )


def test_batch_statistics_that_the_step_averages_are_the_mean_over_replicas() -> None:
    strategy = jaxdist.MirroredStrategy()
    net = Net(has_norm=True)
    state, _ = _trained(strategy, net, num_steps=1)
    dense = _state(net).params["Dense_0"]
    hidden = np.tanh(X @ np.asarray(dense["kernel"]) + np.asarray(dense["bias"]))
    stats = state.batch_stats["BatchNorm_0"]
    np.testing.assert_allclose(stats["mean"], 0.5 * hidden.mean(axis=0), atol=1e-5)
    local = hidden.reshape(8, 2, 8).var(axis=1).mean(axis=0)
    np.testing.assert_allclose(stats["var"], 0.5 + 0.5 * local, rtol=1e-4)


def test_batch_statistics_that_are_not_averaged_are_refused_by_name() -> None:
    strategy = jaxdist.MirroredStrategy()
    net = Net(has_norm=True)

    def step(state: Any, batch: Any) -> Any:
        variables = {"params": state.params, "batch_stats": state.batch_stats}
        _, changed = state.apply_fn(variables, batch[0], train=True, mutable=["batch_stats"])
        return state.replace(batch_stats=changed["batch_stats"])

    with pytest.raises(jaxdist.errors.StateDivergenceError, match=r"batch_stats.*mean"):
        strategy.run(step, (_state(net), _batch(strategy)))


def test_dropout_with_the_replica_in_the_key_differs_between_replicas_and_trains() -> None:
    strategy = jaxdist.MirroredStrategy()
    net = Net(rate=0.5)
    state, losses = _trained(strategy, net, num_steps=12)
    assert min(losses[6:]) < losses[0]

    def dropped(state: Any, key: Any) -> Any:
        key = jax.random.fold_in(key, get_replica_context().replica_id_in_sync_group)
        ones = {"params": jax.tree.map(jnp.ones_like, state.params)}
        return state.apply_fn(ones, jnp.ones((1, 4)), train=True, rngs={"dropout": key})

    sums = np.asarray(strategy.run(dropped, (state, jax.random.key(0))).array)[:, 0]
    assert len(set(sums.tolist())) > 1


def test_the_gradients_of_a_train_state_are_checked() -> None:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    state = _state(Net())

    def twice(state: Any, batch: Any) -> Any:
        def loss_of(params: Any) -> Any:
            out = state.apply_fn({"params": params}, batch[0], train=False)
            return jnp.mean((out - batch[1]) ** 2)

        grads = jax.grad(loss_of)(state.params)
        return state.apply_gradients(grads=get_replica_context().all_reduce("sum", grads))

    assert strategy.check_gradients(_step, (state, _batch(strategy), jax.random.key(0))).is_equal
    report = strategy.check_gradients(twice, (state, _batch(strategy)))
    assert report.factor == pytest.approx(2, rel=0.01)
    assert "opt_state[0].mu['Dense_0']['kernel']: 2 times" in repr(report)
