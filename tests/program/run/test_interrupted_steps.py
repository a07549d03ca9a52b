"""Ctrl-C while the results of a step are written leaves no variable behind the others."""

from typing import Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdist
from jaxdist import Variable, _compat, training
from jaxdist._program.variables import lift


@pytest.mark.parametrize("k", [0, 1, 2])
def test_ctrl_c_after_the_kth_variable_is_assigned_leaves_none_behind(
    monkeypatch: pytest.MonkeyPatch, k: int
) -> None:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        held = [Variable(0.0, name=f"v{i}") for i in range(3)]
    write, calls = lift.set_arrays, []

    def interrupt(variables: Any, arrays: Any) -> None:
        calls.append(len(variables))
        if len(calls) == 1:
            write(variables[:k], arrays[:k])
            raise KeyboardInterrupt
        write(variables, arrays)

    monkeypatch.setattr(lift, "set_arrays", interrupt)
    with pytest.raises(KeyboardInterrupt):
        strategy.run(lambda x: [v.assign(x) for v in held] and None, (jnp.float32(5),))
    assert [float(v.read_value()) for v in held] == [5.0] * 3
    assert calls == [3, 3]


@pytest.mark.parametrize("k", [0, 1, 2])
def test_ctrl_c_after_the_kth_nnx_variable_is_written_leaves_none_behind(
    monkeypatch: pytest.MonkeyPatch, k: int
) -> None:
    model = nnx.Dict({f"v{i}": nnx.Variable(jnp.zeros(())) for i in range(3)})
    write, calls = _compat.set_variables, []

    def assign(model: Any, x: Any) -> None:
        for name in model:
            model[name][...] = x

    def interrupt(variables: Any, values: Any) -> None:
        if any(isinstance(v, jax.core.Tracer) for v in values):
            write(variables, values)
            return
        calls.append(len(variables))
        if len(calls) == 1:
            write(variables[:k], values[:k])
            raise KeyboardInterrupt
        write(variables, values)

    monkeypatch.setattr(_compat, "set_variables", interrupt)
    with pytest.raises(KeyboardInterrupt):
        jaxdist.MirroredStrategy(["cpu:0", "cpu:1"]).run(assign, (model, jnp.float32(5)))
    assert [float(model[name][...]) for name in model] == [5.0] * 3


@pytest.mark.parametrize("stop", [1, 2, 3, 4])
def test_ctrl_c_in_an_exchange_gives_both_back(stop: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    averaged = training.moving_average(optax.sgd(0.1), 0.5)
    optimizer = nnx.Optimizer(model, averaged, wrt=nnx.Param)
    optimizer.update(model, jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param)))
    before = jax.tree.map(np.array, (nnx.state(model), nnx.state(optimizer)))
    hold, calls = _compat.set_held, 0

    def interrupt(variable: Any, value: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == stop:
            raise KeyboardInterrupt
        hold(variable, value)

    def show() -> None:
        with training.use_average(model, optimizer):
            pass

    monkeypatch.setattr(_compat, "set_held", interrupt)
    with pytest.raises(KeyboardInterrupt):
        show()
    monkeypatch.undo()
    after = jax.tree.map(np.array, (nnx.state(model), nnx.state(optimizer)))
    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    assert all(np.array_equal(a, b) for a, b in pairs)
