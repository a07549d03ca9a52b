"""Ctrl-C while the results of a step are written leaves no variable behind the others."""

from typing import Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import pytest

import jaxdist
from jaxdist import Variable, _compat
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
