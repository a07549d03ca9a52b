"""`run` inside JAX's own transformations."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdist
from jaxdist import PerReplica, get_replica_context
from tests.program.run.counting import compilations

ROWS = np.linspace(-1, 1, 32, dtype=np.float32).reshape(16, 2)


def _step(w: Any, x: Any) -> Any:
    grad = jax.grad(lambda v: jnp.mean((x @ v - 1) ** 2))(w)
    return w - 0.1 * get_replica_context().all_reduce("mean", grad)


def _expected(steps: int) -> np.ndarray:
    w, x = np.zeros(2), ROWS.astype(np.float64)
    for _ in range(steps):
        w = w - 0.1 * 2 * x.T @ (x @ w - 1) / 16
    return w


def _laid_out(strategy: jaxdist.Strategy) -> PerReplica:
    return PerReplica.of_global(jax.device_put(ROWS, strategy.per_replica_sharding))


def test_run_inside_jit_scan_and_fori_loop_equals_numpy() -> None:
    strategy = jaxdist.MirroredStrategy()
    x, w = _laid_out(strategy), np.zeros(2, np.float32)

    def scanned(w: Any, x: Any) -> Any:
        return jax.lax.scan(lambda c, _: (strategy.run(_step, (c, x)), None), w, length=5)[0]

    def looped(w: Any, x: Any) -> Any:
        return jax.lax.fori_loop(0, 5, lambda _, c: strategy.run(_step, (c, x)), w)

    once = jax.jit(lambda w, x: strategy.run(_step, (w, x)))(w, x)
    np.testing.assert_allclose(once, _expected(1), rtol=1e-5)
    for fun in (scanned, looped, jax.jit(scanned), jax.jit(looped)):
        np.testing.assert_allclose(fun(w, x), _expected(5), rtol=1e-5)


def test_a_jitted_loop_over_run_compiles_once() -> None:
    strategy = jaxdist.MirroredStrategy()
    x, w = _laid_out(strategy), jax.device_put(np.zeros(2, "f4"), strategy.replicated_sharding)
    many = jax.jit(
        lambda w, x: jax.lax.fori_loop(0, 3, lambda _, c: strategy.run(_step, (c, x)), w)
    )
    with compilations() as compiled:
        for _ in range(5):
            w = many(w, x)
    assert compiled.number == 1
    np.testing.assert_allclose(w, _expected(15), rtol=1e-5)


def test_the_same_step_works_outside_inside_and_outside_again() -> None:
    strategy = jaxdist.MirroredStrategy()
    x, w = _laid_out(strategy), np.zeros(2, np.float32)
    inside = jax.jit(lambda w, x: strategy.run(_step, (w, x)))
    for _ in range(3):
        np.testing.assert_allclose(strategy.run(_step, (w, x)), _expected(1), rtol=1e-5)
        np.testing.assert_allclose(inside(w, x), _expected(1), rtol=1e-5)


def test_values_given_one_by_one_can_be_split_inside_jit() -> None:
    # They are tracers there, and were taken for arrays on devices.
    strategy = jaxdist.MirroredStrategy()
    x = PerReplica(list(ROWS.reshape(8, 2, 2)))
    out = jax.jit(lambda w, x: strategy.run(_step, (w, x)))(np.zeros(2, np.float32), x)
    np.testing.assert_allclose(out, _expected(1), rtol=1e-5)


def _mirrored_loss(w: Any, x: Any) -> Any:
    return get_replica_context().all_reduce("mean", jnp.mean((jnp.tanh(x @ w) - 1) ** 2))


def _local_loss(w: Any, x: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ w) - 1) ** 2)


def _gathered_loss(w: Any, x: Any) -> Any:
    whole = get_replica_context().all_gather(jnp.tanh(x @ w), axis=0)
    return jnp.mean((whole - 1) ** 2)


@pytest.mark.parametrize("jitted", [True, False], ids=["jitted", "eager"])
@pytest.mark.parametrize("loss", [_mirrored_loss, _local_loss, _gathered_loss])
def test_the_gradient_through_run_is_that_of_one_device(loss: Any, jitted: bool) -> None:
    strategy = jaxdist.MirroredStrategy()
    one = jaxdist.OneDeviceStrategy("cpu:0")
    w = np.array([0.3, -0.7], np.float32)

    def through(strategy: Any, x: Any) -> Any:
        def total(w: Any) -> Any:
            out = strategy.run(loss, (w, x))
            return jnp.mean(out.array) if isinstance(out, PerReplica) else out

        return (jax.jit(jax.grad(total)) if jitted else jax.grad(total))(w)

    expected = jax.grad(lambda w: jnp.mean((jnp.tanh(ROWS @ w) - 1) ** 2))(w)
    np.testing.assert_allclose(through(strategy, _laid_out(strategy)), expected, rtol=1e-5)
    np.testing.assert_allclose(through(one, ROWS), expected, rtol=1e-5)


def test_a_step_may_close_over_traced_values_of_the_jit_around_it() -> None:
    strategy = jaxdist.MirroredStrategy()

    @jax.jit
    def outer(scale: Any, x: Any) -> Any:
        return strategy.run(lambda x: scale * get_replica_context().all_reduce("sum", x), (x,))

    x = PerReplica.of_global(
        jax.device_put(np.arange(8, dtype=np.float32), strategy.per_replica_sharding),
        scalars=True,
    )
    for scale in (1.0, 2.0):
        assert float(outer(scale, x)) == 28 * scale


def test_a_plain_array_is_mirrored_inside_jit() -> None:
    strategy = jaxdist.MirroredStrategy()
    x = jax.device_put(np.arange(8, dtype=np.float32), strategy.per_replica_sharding)
    assert float(jax.jit(lambda x: strategy.run(lambda v: v.sum(), (x,)))(x)) == 28
    assert isinstance(strategy.run(lambda v: v.sum(), (x,)), PerReplica)
