"""The moving average of parameters: its law is that of NumPy, inside any transformation."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

import jaxdist
from jaxdist import partition, training
from jaxdist.errors import ArgumentError, ArgumentTypeError, ContextError
from tests.fit.models import mirrored


def _average(state: Any) -> Any:
    return optax.tree.get(state, "average")


def _apply(params: Any, updates: Any) -> Any:
    return optax.apply_updates(params, updates)


@given(decay=st.floats(0, 0.999), seed=st.integers(0, 99), steps=st.integers(1, 5))
def test_the_average_is_that_of_numpy_after_any_number_of_steps(
    decay: float, seed: int, steps: int
) -> None:
    rng = np.random.default_rng(seed)
    params: Any = {"w": jnp.asarray(rng.normal(size=(3, 2)), jnp.float32), "b": jnp.zeros(2)}
    tx = training.moving_average(optax.adam(0.3), decay)
    state = tx.init(params)
    wanted: Any = jax.tree.map(lambda p: np.asarray(p, np.float64), params)
    plain: Any = params
    plain_state = optax.adam(0.3).init(params)
    for _ in range(steps):
        grads = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), jnp.float32), params)
        updates, state = tx.update(grads, state, params)
        params = _apply(params, updates)
        updates, plain_state = optax.adam(0.3).update(grads, plain_state, plain)
        plain = _apply(plain, updates)
        wanted = jax.tree.map(
            lambda a, p: decay * a + (1 - decay) * np.asarray(p, np.float64), wanted, params
        )
    for name in params:
        np.testing.assert_array_equal(params[name], plain[name])
        np.testing.assert_allclose(_average(state)[name], wanted[name], rtol=1e-5, atol=1e-6)


def test_parameters_of_8_bits_have_an_average_that_moves() -> None:
    params: Any = jnp.ones(2, jnp.bfloat16)
    tx = training.moving_average(optax.sgd(1.0), 0.999)
    state = tx.init(params)
    for _ in range(4):
        # The parameters stay where the first update puts them: at 2.
        updates, state = tx.update(-jnp.ones_like(params) * (2 - params), state, params)
        params = _apply(params, updates)
    assert _average(state).dtype == jnp.float32
    np.testing.assert_allclose(_average(state), 2 - 0.999**4, rtol=1e-6)


def test_it_moves_once_for_the_steps_that_an_optimizer_accumulates() -> None:
    tx = optax.MultiSteps(training.moving_average(optax.sgd(1.0), 0.5), 2).gradient_transformation()
    params: Any = jnp.zeros(())
    state, found = tx.init(params), []
    for _ in range(4):
        updates, state = tx.update(-jnp.ones(()), state, params)
        params = _apply(params, updates)
        found.append(float(_average(state)))
    assert found == [0, 0.5, 0.5, 1.25]


def test_arguments_are_named() -> None:
    with pytest.raises(ArgumentTypeError, match=r"moving_average was given tx=3"):
        training.moving_average(3)  # type: ignore[arg-type]
    steps = optax.MultiSteps(optax.sgd(1.0), 2)
    several: list[Any] = [steps, steps.gradient_transformation()]
    for given_tx in several:
        with pytest.raises(ArgumentError, match=r"Put it outside: optax.MultiSteps"):
            training.moving_average(given_tx)
    for decay in (1.0, -0.1):
        with pytest.raises(ArgumentError, match=r"decay="):
            training.moving_average(optax.sgd(1.0), decay)
    tx = training.moving_average(optax.sgd(1.0))
    with pytest.raises(ArgumentTypeError, match=r"moving_average: update was given params=None"):
        tx.update(jnp.ones(1), tx.init(jnp.ones(1)))


def _make(tx: Any, seed: int = 0) -> tuple[Any, Any]:
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(seed))
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def test_a_block_with_the_average_needs_an_optimizer_of_this_model_that_has_one() -> None:
    model, optimizer = _make(optax.sgd(1.0))
    with pytest.raises(ArgumentError, match=r"state has 0 averages"):
        training.use_average(model, optimizer).__enter__()
    _, optimizer = _make(training.moving_average(optax.sgd(1.0)))
    other = nnx.LayerNorm(2, rngs=nnx.Rngs(0))
    with pytest.raises(ArgumentError, match=r"2 parameters, and an average of 2 of other paths"):
        training.use_average(other, optimizer).__enter__()
    with pytest.raises(ArgumentTypeError, match=r"use_average was given optimizer=3"):
        training.use_average(model, 3).__enter__()  # type: ignore[arg-type]


def _step(model: Any, optimizer: Any, x: jax.Array) -> jax.Array:
    def total(model: Any) -> jax.Array:
        return jnp.sum(jnp.square(model(x)))

    loss, grads = nnx.value_and_grad(total)(model)
    return training.reduce_and_update(model, optimizer, grads, x.shape[0], loss)[1]


@pytest.mark.parametrize("kind", ["whole", "pieces of parameters", "pieces of the state"])
def test_a_step_of_ones_own_on_replicas_has_the_average_of_one_device(kind: str) -> None:
    x = np.random.default_rng(0).normal(size=(8, 2)).astype(np.float32)
    found = []
    for replicas in (1, 4):
        strategy, tx = mirrored(replicas), training.moving_average(optax.adam(0.1), 0.5)
        with strategy.scope():
            if kind == "pieces of the state":
                tx = jaxdist.sharded_update(tx, min_bytes=0)
            model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
            if kind == "pieces of parameters":
                partition.place(strategy, model, partition.fsdp(min_bytes=0))
            optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        rows = jax.device_put(x, strategy.per_replica_sharding)
        for _ in range(3):
            strategy.run(_step, (model, optimizer, rows))
        before = np.asarray(partition.gather(model).kernel[...])
        with training.use_average(model, optimizer):
            average = np.asarray(partition.gather(model).kernel[...])
        after = np.asarray(partition.gather(model).kernel[...])
        np.testing.assert_array_equal(after, before)
        assert np.abs(average - before).max() > 0.01
        found.append(average)
        # The state is as it was: the next step runs.
        strategy.run(_step, (model, optimizer, rows))
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5, atol=1e-6)


def test_an_error_in_the_block_gives_the_parameters_back() -> None:
    model, optimizer = _make(training.moving_average(optax.sgd(1.0), 0.5))
    before = np.asarray(model.kernel[...])
    optimizer.update(model, nnx.state(model, nnx.Param))
    moved = np.asarray(model.kernel[...])
    shown = []

    def fail() -> None:
        with training.use_average(model, optimizer):
            shown.append(np.asarray(model.kernel[...]))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    np.testing.assert_allclose(shown[0], (before + moved) / 2, rtol=1e-6)
    np.testing.assert_array_equal(model.kernel[...], moved)


def test_what_is_assigned_in_the_block_is_assigned_to_the_average() -> None:
    model, optimizer = _make(training.moving_average(optax.sgd(1.0), 0.5))
    before = np.asarray(model.bias[...])
    with training.use_average(model, optimizer):
        model.bias[...] = jnp.full(3, 7.0)
    np.testing.assert_array_equal(model.bias[...], before)
    with training.use_average(model, optimizer):
        np.testing.assert_array_equal(model.bias[...], np.full(3, 7.0))


def test_a_block_within_a_block_has_the_average_too() -> None:
    model, optimizer = _make(training.moving_average(optax.sgd(1.0), 0.5))
    optimizer.update(model, nnx.state(model, nnx.Param))
    moved = np.asarray(model.kernel[...])
    with training.use_average(model, optimizer):
        outer = np.asarray(model.kernel[...])
        with training.use_average(model, optimizer):
            np.testing.assert_array_equal(model.kernel[...], outer)
        np.testing.assert_array_equal(model.kernel[...], outer)
    np.testing.assert_array_equal(model.kernel[...], moved)
    assert np.abs(outer - moved).max() > 0


def test_steps_that_accumulate_inside_of_a_chain_are_refused() -> None:
    inner = optax.MultiSteps(optax.sgd(1.0), 4).gradient_transformation()
    tx = training.moving_average(optax.chain(optax.identity(), inner), 0.5)
    with pytest.raises(ArgumentError, match=r"Put it outside: optax.MultiSteps"):
        tx.init(jnp.zeros(1))


def test_an_optimizer_that_is_updated_in_the_block_is_an_error() -> None:
    model, optimizer = _make(training.moving_average(optax.sgd(0.1), 0.5))
    strategy = mirrored(2)
    x = jnp.ones((4, 2))

    def train() -> None:
        with training.use_average(model, optimizer):
            strategy.run(_step, (model, optimizer, x))

    with pytest.raises(ContextError, match="the optimizer was updated in the block"):
        train()
    # Nothing is deleted.
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(nnx.state(model)))


def test_parameters_that_are_not_trained_stay_as_they_are_in_the_block() -> None:
    averaged = training.moving_average(optax.sgd(0.5), 0.5)
    tx = optax.multi_transform(
        {"trained": averaged, "frozen": optax.set_to_zero()},
        lambda params: jax.tree.map_with_path(
            lambda path, _: "frozen" if "bias" in str(path) else "trained", params
        ),
    )
    model, optimizer = _make(tx)
    bias = np.array(model.bias[...])
    before = np.array(model.kernel[...])
    _step(model, optimizer, jnp.ones((4, 2)))
    last = np.array(model.kernel[...])
    with training.use_average(model, optimizer):
        np.testing.assert_array_equal(model.bias[...], bias)
        np.testing.assert_allclose(model.kernel[...], (before + last) / 2, rtol=1e-6)
    np.testing.assert_array_equal(model.kernel[...], last)


def test_the_average_of_another_shape_is_refused() -> None:
    _, optimizer = _make(training.moving_average(optax.sgd(0.1)))
    with pytest.raises(ArgumentError, match="of other paths or shapes"):
        training.use_average(nnx.Linear(7, 3, rngs=nnx.Rngs(0)), optimizer).__enter__()
