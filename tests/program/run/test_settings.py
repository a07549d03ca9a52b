"""A setting of JAX that changes between two calls holds for the second, as with `jax.jit`."""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxdist
from jaxdist import PerReplica, RunOptions, Strategy, Variable
from tests.program.run.counting import compilations

_OF_USER: Any = jax.make_user_context(1)

Setting = Callable[[], contextlib.AbstractContextManager[Any]]

# A setting, and a function of an array [2] whose result depends on it.
SETTINGS: dict[str, tuple[Setting, Callable[[Any], Any]]] = {
    "64 bits": (lambda: jax.enable_x64(True), lambda x: jnp.arange(3) / 2 + 0 * x.sum()),
    "threefry": (
        lambda: jax.threefry_partitionable(False),
        lambda x: jax.random.uniform(jax.random.key(3), (4,)) + 0 * x.sum(),
    ),
    "a context of the user": (lambda: _OF_USER(5), lambda x: x.sum() * _OF_USER.value),
}


class Model(nnx.Module):
    """A module, whose calls JAX's call path takes apart."""

    def __init__(self) -> None:
        self.weight = nnx.Param(jnp.zeros(()))


def _plain(strategy: Strategy, of: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def step(x: Any) -> Any:
        return of(x)

    return lambda x: strategy.run(step, (x,))


def _module(strategy: Strategy, of: Callable[[Any], Any]) -> Callable[[Any], Any]:
    model = Model()

    def step(model: Model, x: Any) -> Any:
        return of(x) + model.weight[...].astype(jnp.int8)

    return lambda x: strategy.run(step, (model, x))


def _static(strategy: Strategy, of: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def step(x: Any, count: int) -> Any:
        return of(x[:count])

    options = RunOptions(static_argnames=("count",))
    return lambda x: strategy.run(step, (x, 2), options=options)


def _variable(strategy: Strategy, of: Callable[[Any], Any]) -> Callable[[Any], Any]:
    with strategy.scope():
        variable = Variable(np.int8(0))

    def step(x: Any) -> Any:
        return of(x) + variable[...]

    return lambda x: strategy.run(step, (x,))


def _per_replica(strategy: Strategy, of: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def step(x: Any) -> Any:
        return of(x)

    count = strategy.num_replicas_in_sync

    def call(x: Any) -> Any:
        result = strategy.run(step, (PerReplica([x] * count),))
        return strategy.experimental_local_results(result)[-1]

    return call


def _function(strategy: Strategy, of: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @jaxdist.function
    def call(x: Any) -> Any:
        return strategy.run(of, (x,))

    return call


def _jit(strategy: Strategy, of: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return jax.jit(lambda x: strategy.run(of, (x,)))


WAYS = (_plain, _module, _static, _variable, _per_replica, _function, _jit)
STRATEGIES = {
    "one device": lambda: jaxdist.OneDeviceStrategy("cpu:0"),
    "two": lambda: jaxdist.MirroredStrategy(["cpu:0", "cpu:1"]),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_call_under_another_setting_has_the_result_of_jit_there(
    setting: str, way: Callable[..., Any], strategy: str
) -> None:
    change, of = SETTINGS[setting]
    x = np.ones(2, np.float32)
    call = way(STRATEGIES[strategy](), of)

    def check() -> None:
        found, expected = call(x), jax.jit(lambda x: of(x))(x)
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)

    results = []
    for _ in range(2):
        check()
        results.append(np.asarray(call(x)))
        with change():
            check()
            check()
            results.append(np.asarray(call(x)))
    # The setting has an effect at all.
    before, under = results[:2]
    assert before.dtype != under.dtype or not np.array_equal(before, under)


@pytest.mark.parametrize("setting", [jax.numpy_dtype_promotion, jax.numpy_rank_promotion])
def test_a_setting_that_refuses_an_operation_refuses_it_in_a_step_that_ran_before(
    setting: Any,
) -> None:
    values = {jax.numpy_dtype_promotion: "strict", jax.numpy_rank_promotion: "raise"}
    lenient = {jax.numpy_dtype_promotion: "standard", jax.numpy_rank_promotion: "allow"}
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    x = jnp.ones((2, 2))

    def step(x: Any) -> Any:
        return x + jnp.arange(2)

    with setting(lenient[setting]), jax.numpy_rank_promotion("allow"):
        np.testing.assert_array_equal(strategy.run(step, (x,)), [[1, 2], [1, 2]])
    with jax.numpy_rank_promotion("allow"), setting(values[setting]):
        with pytest.raises((TypeError, ValueError), match="promot"):
            strategy.run(step, (x,))


def test_settings_that_return_compile_nothing_again() -> None:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    x = jax.device_put(jnp.ones(2), strategy.replicated_sharding)

    def step(x: Any) -> Any:
        return x * _OF_USER.value

    def both() -> list[Any]:
        own = strategy.run(step, (x,))
        with _OF_USER(3), jax.default_device("cpu"):
            return [own, strategy.run(step, (x,))]

    before = both()
    with compilations() as count:
        after = both()
        with pytest.warns(DeprecationWarning, match="with mesh"), strategy.mesh:
            np.testing.assert_array_equal(strategy.run(step, (x,)), [1, 1])
    assert count.number == 0
    np.testing.assert_array_equal(before, after)


def test_a_retrace_warning_names_the_settings() -> None:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])

    def step(x: Any) -> Any:
        return x * _OF_USER.value

    def run_under_many() -> None:
        for number in range(20):
            with _OF_USER(number):
                assert float(strategy.run(step, (2.0,))) == 2 * number

    with pytest.warns(jaxdist.errors.RetraceWarning, match="a setting of JAX"):
        run_under_many()
