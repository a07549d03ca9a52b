"""With `jax_debug_nans` a step that makes a nan is an error with the line that made it."""

import concurrent.futures
import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxdist
from jaxdist import PerReplica, RunOptions

# Replica 2 alone has a row that makes a nan.
ROWS = PerReplica([np.full(2, 1.0 - (r == 2) * 3, np.float32) for r in range(4)])
FINE = PerReplica([np.full(2, 1.0, np.float32) for _ in range(4)])
UNEVEN = PerReplica([np.full(r + 1, 1.0 - (r == 2) * 3, np.float32) for r in range(4)])


def _strategy() -> jaxdist.Strategy:
    return jaxdist.MirroredStrategy([f"cpu:{i}" for i in range(4)])


def _step(w: Any, x: Any) -> Any:
    y = x * 2
    z = jnp.log(y)  # the line
    return w + jaxdist.get_replica_context().all_reduce("sum", z.sum())


def _of_gradient(w: Any, x: Any) -> Any:
    def loss(w: Any) -> Any:
        return jnp.sqrt((w * (x - x)).sum())  # the line

    return w - jaxdist.get_replica_context().all_reduce("sum", jax.grad(loss)(w))


def _line_of(fn: Callable[..., Any]) -> str:
    with open(__file__) as source:
        lines = source.read().split("\n")
    first = fn.__code__.co_firstlineno
    return (
        f"{__file__}:{next(i for i, x in enumerate(lines, 1) if i > first and '# the line' in x)}"
    )


@pytest.mark.parametrize("donates", [False, True], ids=["kept", "donated"])
@pytest.mark.parametrize("warm", [False, True], ids=["first call", "later call"])
@pytest.mark.parametrize("context", [False, True], ids=["config", "block"])
def test_the_line_of_a_nan_is_named_and_nothing_is_lost(
    donates: bool, warm: bool, context: bool
) -> None:
    def run() -> None:
        strategy = _strategy()
        options = RunOptions(donate_argnums=(0,)) if donates else None
        w = jax.device_put(np.float32(3), strategy.replicated_sharding)
        if warm:
            for _ in range(3):
                w = strategy.run(_step, (w, FINE), options=options)
        before = float(w)
        with jax.debug_nans(True) if context else _set_everywhere():
            with pytest.raises(FloatingPointError) as error:
                strategy.run(_step, (w, ROWS), options=options)
            assert float(w) == before
            fine = strategy.run(_step, (w, FINE), options=options)
        assert float(fine) == pytest.approx(before + 8 * np.log(2))
        assert f"log at {_line_of(_step)} (_step)" in str(error.value)
        assert "on replica 2" in str(error.value)

    # In a new thread: JAX no longer follows the setting of the process in a thread in which
    # its context manager was used, for calls that it knows.
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        threads.submit(run).result()


@contextlib.contextmanager
def _set_everywhere() -> Any:
    jax.config.update("jax_debug_nans", True)
    try:
        yield
    finally:
        jax.config.update("jax_debug_nans", False)


def test_the_line_is_found_in_uneven_steps_and_in_gradients() -> None:
    strategy = _strategy()
    with jax.debug_nans(True):
        with pytest.raises(FloatingPointError) as error:
            strategy.run(_step, (np.float32(0), UNEVEN))
        assert _line_of(_step) in str(error.value)
        with pytest.raises(FloatingPointError) as error:
            strategy.run(_of_gradient, (np.float32(1), FINE))
        assert _line_of(_of_gradient) in str(error.value)


def test_a_nan_that_only_the_sum_over_replicas_makes_is_that_of_the_collective() -> None:
    infinities = PerReplica([np.float32(np.inf), np.float32(-np.inf), *np.ones(2, np.float32)])

    def step(x: Any) -> Any:
        return jaxdist.get_replica_context().all_reduce("sum", x)  # the line

    with jax.debug_nans(True), pytest.raises(FloatingPointError) as error:
        _strategy().run(step, (infinities,))
    assert f"psum at {_line_of(step)}" in str(error.value)


def test_infinities_are_found_too() -> None:
    zeros = PerReplica([np.zeros(2, np.float32)] * 4)
    with jax.debug_infs(True), pytest.raises(FloatingPointError, match=r"log at .*\(inf\)"):
        _strategy().run(_step, (np.float32(0), zeros))


def test_variables_keep_the_values_that_they_had() -> None:
    strategy = _strategy()
    model: Any = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    with strategy.scope():
        variable = jaxdist.Variable(np.float32(5), aggregation=jaxdist.VariableAggregation.SUM)

    def step(model: Any, x: Any) -> None:
        total = jaxdist.get_replica_context().all_reduce("sum", jnp.log(x).sum())
        model.bias[...] = model.bias[...] + total
        variable.assign_add(total)

    strategy.run(step, (model, FINE))
    held, bias = float(variable.numpy()), model.bias[...].tolist()
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="log at"):
        strategy.run(step, (model, ROWS))
    assert float(variable.numpy()) == held
    assert model.bias[...].tolist() == bias


def test_a_nan_that_came_in_is_said_to_be_of_no_operation() -> None:
    given = PerReplica([np.full(2, np.nan, np.float32)] * 4)
    with (
        jax.debug_nans(True),
        pytest.raises(FloatingPointError, match="returns one that it was given"),
    ):
        _strategy().run(lambda x: x, (given,))


def test_an_operation_that_was_given_a_nan_says_so() -> None:
    given = PerReplica([np.full(2, np.nan, np.float32)] * 4)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="It got one as input"):
        _strategy().run(lambda x: x + 1, (given,))


def test_virtual_replicas_are_told_why_no_line_is_found() -> None:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"], deterministic=4)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="deterministic=True"):
        strategy.run(_step, (np.float32(0), ROWS))


def test_inside_jit_the_line_is_found() -> None:
    strategy = _strategy()

    @jax.jit
    def outer(x: Any) -> Any:
        return strategy.run(_step, (np.float32(0), x))

    with jax.debug_nans(True), pytest.raises(FloatingPointError) as error:
        outer(ROWS)
    assert _line_of(_step) in str(error.value)


def _log_of(x: Any) -> Any:
    return jnp.log(x).sum()  # the line


def _loop_of(x: Any) -> Any:
    def body(total: Any, row: Any) -> Any:
        return total + jnp.sqrt(row), None  # the line

    return jax.lax.scan(body, jnp.float32(0), x)[0]


def _step_of(x: Any) -> Any:
    def step(x: Any) -> Any:
        z = jnp.log(x)  # the line
        return jaxdist.get_replica_context().all_reduce("sum", z.sum())

    return _strategy().run(step, (PerReplica.of_global(jnp.concatenate([x] * 4)),))


@pytest.mark.parametrize("warm", [False, True], ids=["first call", "later call"])
@pytest.mark.parametrize("part", [_log_of, _loop_of, _step_of], ids=lambda f: f.__name__)
def test_the_line_of_a_nan_in_a_function_is_named_and_nothing_is_written(
    part: Callable[..., Any], warm: bool
) -> None:
    model: Any = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    with _strategy().scope():
        count = jaxdist.Variable(0.0)

    @jaxdist.function
    def function(model: Any, x: Any) -> Any:
        count.assign_add(1.0)
        model.bias[...] += count
        return part(x)

    good, bad = np.ones(2, np.float32), np.full(2, -1.0, np.float32)
    calls = 3 if warm else 0
    for _ in range(calls):
        function(model, good)
    before = float(count), model.bias[...].tolist()
    with jax.debug_nans(True):
        with pytest.raises(jaxdist.errors.NotFiniteError) as error:
            function(model, bad)
        assert (float(count), model.bias[...].tolist()) == before
        function(model, good)
    assert float(count) == calls + 1
    message = str(error.value)
    assert f" at {_line_of(part)} (" in message
    assert "No state was written" in message


def test_a_function_that_made_a_nan_gives_its_batches_back() -> None:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    rows = [np.full(2, x, np.float32) for x in (1.0, -1.0, 2.0, 3.0)]
    iterator = iter(strategy.experimental_distribute_dataset(rows))

    @jaxdist.function
    def total(iterator: Any) -> Any:
        step = lambda x: jaxdist.get_replica_context().all_reduce("sum", jnp.sqrt(x).sum())  # noqa: E731
        return strategy.run(step, (next(iterator),)) + strategy.run(step, (next(iterator),))

    with jax.debug_nans(True), pytest.raises(jaxdist.errors.NotFiniteError, match="sqrt at"):
        total(iterator)
    assert [float(np.asarray(next(iterator).array)[0]) for _ in rows] == [1.0, -1.0, 2.0, 3.0]


def test_a_function_that_was_given_a_nan_says_so() -> None:
    given = np.full(2, np.nan, np.float32)
    with jax.debug_nans(True):
        with pytest.raises(jaxdist.errors.NotFiniteError, match="argument of the function holds"):
            jaxdist.function(lambda x: x + 1)(given)
        with pytest.raises(jaxdist.errors.NotFiniteError, match="no operation made one"):
            jaxdist.function(lambda x: x)(given)
    zero = np.float32(0)
    with jax.debug_infs(True), pytest.raises(jaxdist.errors.NotFiniteError, match=r"\(inf\)"):
        jaxdist.function(lambda x: 1 / x)(zero)
