"""Ctrl-C in the middle of a step: the context stack is clean and state is whole."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxdist
from jaxdist import MirroredStrategy, PerReplica, RunOptions, Strategy, _replica
from jaxdist._devices import runtime
from tests.strategies.oracle import assert_each, per_replica


class _Model(nnx.Module):
    def __init__(self) -> None:
        self.w = nnx.Param(jnp.zeros(2))
        self.count = nnx.Variable(jnp.zeros((), jnp.int32))


def _values(model: _Model) -> tuple[list[float], int]:
    return model.w[...].tolist(), int(model.count[...])


@pytest.fixture
def two() -> MirroredStrategy:
    return MirroredStrategy(["cpu:0", "cpu:1"])


def test_ctrl_c_while_a_step_is_traced_leaves_the_context_and_the_strategy(
    strategy: Strategy,
) -> None:
    interrupt = [True]

    def step(x: Any) -> Any:
        total = jaxdist.get_replica_context().all_reduce("sum", x)
        if interrupt:
            interrupt.clear()
            raise KeyboardInterrupt
        return total

    x = per_replica(strategy, lambda r: 1.0)
    with strategy.scope():
        before = _replica.current_frame()
        with pytest.raises(KeyboardInterrupt):
            strategy.run(step, (x,))
        assert _replica.current_frame() is before
        assert float(strategy.run(step, (x,))) == strategy.num_replicas_in_sync


def test_ctrl_c_in_a_merge_function_leaves_the_context(two: Strategy) -> None:
    def merge(_: Strategy) -> None:
        raise KeyboardInterrupt

    def step() -> None:
        jaxdist.get_replica_context().merge_call(merge)

    with pytest.raises(KeyboardInterrupt):
        two.run(step)
    assert _replica.current_frame() is None
    assert not jaxdist.has_strategy()


def test_ctrl_c_while_a_step_is_traced_leaves_nnx_state_as_it_was(two: Strategy) -> None:
    model = _Model()
    interrupt = [True]

    def step(model: _Model) -> None:
        model.w[...] = model.w[...] + 1
        if interrupt:
            interrupt.clear()
            raise KeyboardInterrupt
        model.count[...] = model.count[...] + 1

    with pytest.raises(KeyboardInterrupt):
        two.run(step, (model,))
    assert _values(model) == ([0.0, 0.0], 0)
    two.run(step, (model,))
    assert _values(model) == ([1.0, 1.0], 1)


def test_ctrl_c_in_a_value_function_leaves_the_context(two: Strategy) -> None:
    def value_fn(_: Any) -> None:
        raise KeyboardInterrupt

    with two.scope():
        with pytest.raises(KeyboardInterrupt):
            two.experimental_distribute_values_from_function(value_fn)
        assert jaxdist.get_strategy() is two


# While waiting for steps in flight


@pytest.fixture
def interrupted_wait(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes the next wait for the steps in flight end with Ctrl-C, as soon as the next step."""

    def arm() -> None:
        real = jax.block_until_ready
        calls = []

        def block(value: Any) -> Any:
            if not calls:
                calls.append(1)
                raise KeyboardInterrupt
            return real(value)

        for _ in range(runtime.MAX_STEPS_IN_FLIGHT_ON_CPU):
            runtime.CPU_STEPS.count_step(jax.numpy.zeros(1))
        monkeypatch.setattr(jax, "block_until_ready", block)

    return arm


def _sum_step(x: Any) -> Any:
    return jaxdist.get_replica_context().all_reduce("sum", x)


@pytest.mark.parametrize("warm", [False, True], ids=["first_call", "later_call"])
def test_ctrl_c_while_waiting_for_steps_in_flight_leaves_the_context(
    two: Strategy, interrupted_wait: Callable[[], None], warm: bool
) -> None:
    x = PerReplica([1.0, 2.0])
    if warm:
        two.run(_sum_step, (two.run(lambda x: x, (x,)),))
    with two.scope():
        interrupted_wait()
        with pytest.raises(KeyboardInterrupt):
            two.run(_sum_step, (x,))
        assert jaxdist.get_strategy() is two
    assert not jaxdist.has_strategy()
    assert float(two.run(_sum_step, (x,))) == 3.0
    assert_each(two, x, [1.0, 2.0])


def _train(model: _Model, x: Any) -> None:
    grad = jaxdist.get_replica_context().all_reduce("sum", x)
    model.w[...] = model.w[...] + grad
    model.count[...] = model.count[...] + 1


@pytest.mark.parametrize("donate", [(), (0,)], ids=["kept", "donated"])
@pytest.mark.parametrize("warm", [0, 1, 3], ids=["first_call", "second_call", "fourth_call"])
def test_ctrl_c_while_waiting_for_steps_in_flight_leaves_nnx_state_whole(
    two: Strategy, interrupted_wait: Callable[[], None], warm: int, donate: tuple[int, ...]
) -> None:
    model = _Model()
    options = RunOptions(donate_argnums=donate)
    x = two.run(lambda x: x, (PerReplica([1.0, 2.0]),))
    for _ in range(warm):
        two.run(_train, (model, x), options=options)
    interrupted_wait()
    with pytest.raises(KeyboardInterrupt):
        two.run(_train, (model, x), options=options)
    values, count = _values(model)
    # The wait comes before the step: nothing was started, and nothing was given away.
    assert (values, count) == ([3.0 * warm] * 2, warm)
    two.run(_train, (model, x), options=options)
    assert _values(model) == ([3.0 * (warm + 1)] * 2, warm + 1)


def test_ctrl_c_while_variables_are_written_leaves_them_all_new(
    two: Strategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writes one half, is interrupted, and still ends with one consistent state."""
    model = _Model()
    x = two.run(lambda x: x, (PerReplica([1.0, 2.0]),))
    two.run(_train, (model, x))
    real = nnx.Variable.set_raw_value
    writes = []

    def write(self: Any, value: Any, **kwargs: Any) -> None:
        writes.append(1)
        if len(writes) == 2:
            raise KeyboardInterrupt
        real(self, value, **kwargs)

    monkeypatch.setattr(nnx.Variable, "set_raw_value", write)
    interrupted = False
    try:
        two.run(_train, (model, x))
    except KeyboardInterrupt:
        interrupted = True
    monkeypatch.undo()
    values, count = _values(model)
    assert values == [3.0 * count] * 2
    assert count == 2 or (interrupted and count == 1)


def test_ctrl_c_between_steps_in_flight_keeps_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an interrupted wait the count starts anew, so that later steps wait as before."""
    steps = runtime.StepsInFlight()
    waits: list[float] = []

    def block(value: Any) -> None:
        waits.append(float(value))
        if len(waits) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(jax, "block_until_ready", block)
    a, b = jax.numpy.float32(1), jax.numpy.float32(2)
    for _ in range(runtime.MAX_STEPS_IN_FLIGHT_ON_CPU):
        steps.make_room()
        steps.count_step(a)
    with pytest.raises(KeyboardInterrupt):
        steps.make_room()
    for _ in range(runtime.MAX_STEPS_IN_FLIGHT_ON_CPU + 1):
        steps.make_room()
        steps.count_step(b)
    assert waits == [1, 2]


def test_a_step_that_raises_while_traced_leaves_nnx_state_as_it_was(two: Strategy) -> None:
    model = _Model()

    def step(model: _Model) -> None:
        model.w[...] = model.w[...] + 1
        _ = 1 / 0

    with pytest.raises(ZeroDivisionError):
        two.run(step, (model,))
    assert _values(model) == ([0.0, 0.0], 0)
    np.testing.assert_array_equal(model.w[...], np.zeros(2))
