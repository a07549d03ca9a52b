"""A module whose layers are the stages of a pipeline is refused, with the step to write."""

from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType

import jaxdist
from jaxdist import fit, partition
from jaxdist.errors import UnsupportedError


class Net(nnx.Module):
    """Stacked layers and a head."""

    def __init__(self) -> None:
        self.layers = nnx.Dict(kernel=nnx.Param(np.full((8, 4, 4), 0.1, "float32")))
        self.head = nnx.Param(np.ones((4, 1), "float32"))

    def __call__(self, x: jax.Array) -> jax.Array:
        x, _ = jax.lax.scan(lambda x, w: (x + x @ w, None), x, self.layers.kernel[...])
        return x @ self.head[...]


def _strategy(axis: str = "stage") -> Any:
    mesh = jax.make_mesh((2, 4), ("data", axis), axis_types=(AxisType.Auto,) * 2)
    return jaxdist.MirroredStrategy(mesh=mesh, replica_axes=("data",))


def _place(strategy: Any, module: Any, rules: Any) -> Any:
    return partition.place(strategy, module, rules.on_stages("layers/**"))


@pytest.mark.parametrize("rules", [partition.replicated(), partition.fsdp(min_bytes=0)])
def test_a_module_on_stages_is_refused_with_the_step_to_write(rules: Any) -> None:
    strategy = _strategy()
    module = _place(strategy, Net(), rules)
    with pytest.raises(UnsupportedError, match=r"layers/kernel float32\[8, 4, 4\]") as caught:
        fit.Model(module, strategy)
    text = str(caught.value)
    assert text.startswith("fit.Model was given a module")
    assert "4 stages of the axis 'stage'" in text
    step = text[text.index("    def step") : text.index("    for batch")]
    compile(step.replace("\n    ", "\n").strip(), "step", "exec")


def test_a_module_that_is_placed_later_is_refused_by_compile_and_by_fit() -> None:
    strategy = _strategy()
    model = fit.Model(Net(), strategy)
    model.compile(optax.sgd(0.1), "mse")
    _place(strategy, model.module, partition.replicated())
    x = np.ones((8, 4), "float32")
    with pytest.raises(UnsupportedError, match=r"nn\.pipeline_loss"):
        model.fit(x, np.ones((8, 1), "float32"), verbose=0)
    with pytest.raises(UnsupportedError, match=r"nn\.pipeline_loss"):
        model.compile(optax.sgd(0.1), "mse")


def test_a_module_without_stages_trains_on_such_a_mesh() -> None:
    x, y = np.ones((8, 4), "float32"), np.ones((8, 1), "float32")
    losses = []
    for strategy in (_strategy(), jaxdist.OneDeviceStrategy("cpu:0")):
        module = partition.place(strategy, Net(), partition.fsdp(min_bytes=0))
        model = fit.Model(module, strategy)
        model.compile(optax.sgd(0.01), "mse")
        losses.append(model.fit(x, y, batch_size=8, epochs=2, verbose=0).history["loss"])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
