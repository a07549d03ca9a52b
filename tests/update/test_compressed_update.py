"""Gradients that cross between workers in few bits, and lose nothing for good."""

import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxdist
from jaxdist import MirroredStrategy, PerReplica, Sharded, compressed_update
from jaxdist.errors import ArgumentError, ArgumentTypeError, ContextError, ShapeError
from jaxdist.training import Checkpoints
from tests.strategies.oracle import refused


def _regression(tx: Any, strategy: Any, steps: int) -> Any:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 16)).astype(np.float32)
    y = x @ rng.normal(size=(16, 4)).astype(np.float32)
    params = {"w": jnp.zeros((16, 4)), "b": jnp.zeros((1, 4))}
    with strategy.scope():
        state = tx.init(params)

    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        grads = jax.grad(lambda p: jnp.mean((x @ p["w"] + p["b"] - y) ** 2))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    rows = [jax.device_put(v, strategy.per_replica_sharding) for v in (x, y)]
    for _ in range(steps):
        params, state = strategy.run(step, (params, state, *rows))
    return params, state


@pytest.mark.parametrize("compression", ["bf16", "int8"])
@pytest.mark.parametrize("workers", [2, 8])
def test_training_comes_as_far_as_in_all_bits(compression: str, workers: int) -> None:
    strategy = MirroredStrategy()
    found, state = _regression(
        compressed_update(optax.sgd(0.1), compression, workers=workers), strategy, 60
    )
    exact, _ = _regression(jaxdist.sharded_update(optax.sgd(0.1), min_bytes=1e9), strategy, 60)
    for name in exact:
        np.testing.assert_allclose(found[name], exact[name], atol=0.02)
    errors = state[0]
    assert isinstance(errors.given, Sharded)
    pieces = errors.given.array.addressable_shards
    assert {p.data.shape for p in pieces} == {(1, errors.given.shape[1])}
    assert float(jnp.abs(errors.given.array).max()) > 0, "something was rounded"


@pytest.mark.parametrize("compression", ["bf16", "int8"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_seen_and_spoils_no_later_step(compression: str, bad: float) -> None:
    # Of so many numbers XLA's maximum leaves nan out.
    good = np.random.default_rng(0).normal(size=(8, 20_000)).astype(np.float32)
    spoilt = good.copy()
    spoilt[3, 1] = bad
    strategy = MirroredStrategy()
    tx = compressed_update(optax.apply_if_finite(optax.sgd(1.0), 5), compression, workers=2)
    params = {"w": jnp.ones(20_000)}
    with strategy.scope():
        state: Any = tx.init(params)

    def step(grads: Any, state: Any) -> Any:
        return tx.update({"w": grads}, state, params)

    seen = []
    for grads in (good, spoilt, good, good):
        updates, state = strategy.run(step, (PerReplica(list(grads)), state))
        seen.append((int(state[1].total_notfinite), updates["w"]))
    assert [count for count, _ in seen] == [0, 1, 1, 1]
    for number in (0, 2, 3):
        np.testing.assert_allclose(seen[number][1], -good.mean(0), atol=0.02)
    assert np.all(np.isfinite(state[0].given.whole()))


def test_one_worker_compresses_nothing_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    strategy = MirroredStrategy()
    with caplog.at_level(logging.INFO, "jaxdist"):
        found, state = _regression(compressed_update(optax.sgd(0.1)), strategy, 3)
    assert "nothing is compressed" in caplog.text
    assert state[0] == optax.EmptyState()
    exact, _ = _regression(jaxdist.sharded_update(optax.sgd(0.1), min_bytes=1e9), strategy, 3)
    np.testing.assert_allclose(found["w"], exact["w"], rtol=1e-5)


def test_one_replica_is_the_transformation_itself() -> None:
    one, _ = _regression(
        compressed_update(optax.sgd(0.1), workers=1), jaxdist.OneDeviceStrategy("cpu:0"), 3
    )
    tx = compressed_update(optax.sgd(0.1))
    w = jnp.ones(3)
    updates: Any = tx.update(w, tx.init(w), w)[0]
    np.testing.assert_allclose(updates, -0.1 * w)
    eight, _ = _regression(compressed_update(optax.sgd(0.1), workers=1), MirroredStrategy(), 3)
    np.testing.assert_allclose(one["w"], eight["w"], rtol=1e-4)


def test_flax_optimizers_and_the_op_by_op_executor_take_it() -> None:
    strategy = MirroredStrategy([f"cpu:{i}" for i in range(4)])
    x = PerReplica([np.full((2, 8), r + 1, np.float32) for r in range(4)])

    def train(eagerly: bool) -> Any:
        with strategy.scope():
            model = nnx.Linear(8, 3, rngs=nnx.Rngs(0))
            tx = compressed_update(optax.adam(0.01), "int8", workers=2)
            optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

        def step(model: Any, optimizer: Any, x: Any) -> Any:
            grads = nnx.grad(lambda m: jnp.mean(m(x) ** 2))(model)
            optimizer.update(model, grads)

        with jaxdist.config.run_eagerly(eagerly):
            for _ in range(3):
                strategy.run(step, (model, optimizer, x))
        return np.asarray(model.kernel[...])

    np.testing.assert_allclose(train(False), train(True), rtol=1e-5)


def test_a_steady_loop_compiles_once() -> None:
    strategy = MirroredStrategy()
    tx = compressed_update(optax.adam(0.1), workers=4)
    params = jnp.ones(100)
    with strategy.scope():
        state = tx.init(params)
    traces = []

    def step(params: Any, state: Any) -> Any:
        traces.append(1)
        updates, state = tx.update(params, state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(4):
        params, state = strategy.run(step, (params, state))
    assert len(traces) == 1


def test_what_it_cannot_take_is_refused() -> None:
    with refused(ArgumentError, "'int4'"):
        compressed_update(optax.sgd(0.1), "int4")
    with refused(ArgumentTypeError, "tx is an optax.GradientTransformation"):
        compressed_update("adam")  # pyrefly: ignore
    with refused(ArgumentTypeError, "workers='2'"):
        compressed_update(optax.sgd(0.1), workers="2")  # pyrefly: ignore
    strategy = MirroredStrategy()
    with strategy.scope(), refused(ArgumentError, "workers=3", "workers=1 or 2 or 4 or 8"):
        compressed_update(optax.sgd(0.1), workers=3).init(jnp.ones(2))
    tx = compressed_update(optax.sgd(0.1), workers=2)
    with strategy.scope():
        state = tx.init(jnp.ones(2))
        with refused(ContextError, "strategy.run"):
            tx.update(jnp.ones(2), state)
    with refused(ContextError, "outside every strategy"):
        tx.update(jnp.ones(2), state)
    with refused(ArgumentTypeError, "grads is int32[2]"):
        strategy.run(lambda s: tx.update(jnp.ones(2, int), s)[1], (state,))
    with refused(ArgumentError, "2 workers", "Checkpoints", "tx.init(params)"):
        strategy.run(lambda s: tx.update(jnp.ones(20000), s)[1], (state,))
    exact = MirroredStrategy(deterministic=True)
    with exact.scope(), refused(ArgumentError, "deterministic=True"):
        tx.init(jnp.ones(2))


@pytest.mark.parametrize(
    ("before", "after"), [((8, 2), (6, 3)), ((4, 4), (8, 4)), ((6, 2), (2, 2))], ids=str
)
def test_what_is_not_sent_yet_is_kept_on_another_number_of_replicas(
    tmp_path: Path, before: tuple[int, int], after: tuple[int, int]
) -> None:
    def tx_for(workers: int) -> Any:
        return compressed_update(optax.sgd(1.0), "bf16", workers=workers)

    def restored(replicas: int, workers: int) -> tuple[Any, Any, Any]:
        strategy = MirroredStrategy([f"cpu:{i}" for i in range(replicas)])
        with strategy.scope():
            return strategy, tx_for(workers), tx_for(workers).init(params)

    params = jnp.zeros(37)
    gradients = np.random.default_rng(0).normal(size=(24, 37)).astype(np.float32)

    def sent(strategy: Any, tx: Any, state: Any, rows: Any) -> tuple[Any, Any]:
        x = jax.device_put(rows, strategy.per_replica_sharding)
        updates, state = strategy.run(lambda s, x: tx.update(x.mean(0), s), (state, x))
        return np.asarray(updates), state

    strategy, tx, state = restored(*before)
    first, state = sent(strategy, tx, state, gradients)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, {})
        strategy, tx, like = restored(*after)
        state = checkpoints.restore(1, like=like).state
    assert state[0].given.shape == like[0].given.shape
    # Nothing was lost: gradients of zeros send what is left, but for what bfloat16 leaves of it.
    second, _ = sent(strategy, tx, state, np.zeros_like(gradients))
    mean = -gradients.mean(0)
    assert np.abs(first - mean).max() > 1e-4
    np.testing.assert_allclose(first + second, mean, atol=2e-5)


def test_gradients_and_states_that_do_not_fit_are_named() -> None:
    strategy = MirroredStrategy()
    tx = compressed_update(optax.adam(0.1), workers=2)
    params = {"w": jnp.ones(3), "b": jnp.ones(2)}
    with strategy.scope():
        state: Any = tx.init(params)
    wrongs: list[Any] = [None, {"w": params["w"]}, {**params, "b": None}]
    for wrong in wrongs:
        with refused(ShapeError, "compressed_update", "updates['b']: nothing", "float32[2]"):
            strategy.run(lambda s, g=wrong: tx.update(g, s, params)[0], (state,))
    for none in (None, [1, 2], (state[0],)):
        with refused(ArgumentTypeError, "compressed_update", "tx.init(params)"):
            strategy.run(lambda s: tx.update(params, s, params)[0], (none,))
