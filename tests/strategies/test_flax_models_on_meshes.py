"""Flax models for one array over the whole mesh, as Flax's guide on sharding writes them.

Their layouts name the axis of the rows, which is the axis of replicas in a step. The oracle is
`jax.jit` of the same model and the same loss over all rows.
"""

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxdist

WIDTH, LAYERS, STEPS = 16, 2, 3
INIT = nnx.initializers.lecun_normal()
X, Y = np.random.default_rng(0).normal(size=(2, 8, WIDTH)).astype("float32")


class AutoLayer(nnx.Module):
    """The variables name axes in their metadata, and an activation has a constraint."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        init = nnx.with_partitioning(INIT, (None, "model"))
        self.first = nnx.Linear(WIDTH, WIDTH, kernel_init=init, use_bias=False, rngs=rngs)
        second = INIT(rngs.params(), (WIDTH, WIDTH))
        self.second = nnx.Param(second, out_sharding=("model", None))

    def __call__(self, x: Any) -> Any:
        y = jax.nn.relu(self.first(x))
        y = jax.lax.with_sharding_constraint(y, P("data", "model"))
        return jnp.dot(y, self.second[...])


class ExplicitLayer(nnx.Module):
    """The types of the variables have shardings, and a product says that of its result."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        init = functools.partial(INIT, out_sharding=P(None, "model"))
        self.first = nnx.Linear(WIDTH, WIDTH, kernel_init=init, use_bias=False, rngs=rngs)
        self.second = nnx.Param(INIT(rngs.params(), (WIDTH, WIDTH), out_sharding=P("model", None)))
        self.bias = nnx.Param(jnp.zeros((WIDTH,), out_sharding=P(None)))

    def __call__(self, x: Any) -> Any:
        y = jax.nn.relu(self.first(x))
        return jnp.dot(y, self.second[...], out_sharding=P("data", None)) + self.bias[...][None]


class Stack(nnx.Module):
    """Some layers in one stack, and a scan over them."""

    def __init__(self, layer: type[nnx.Module], rngs: nnx.Rngs) -> None:
        make: Any = layer
        if layer is AutoLayer:
            metadata = {nnx.PARTITION_NAME: None}
            made = nnx.vmap(make, transform_metadata=metadata)(rngs.split(LAYERS))
        else:
            made = jax.vmap(make, spmd_axis_name=None)(rngs.split(LAYERS))
        self.layers = made

    def __call__(self, x: Any) -> Any:
        return jax.lax.scan(lambda x, layer: (layer(x), None), x, self.layers)[0]


def _loss(model: Any, x: Any, y: Any) -> Any:
    return jnp.mean((model(x) - y) ** 2)


@jax.jit
def _jitted_step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
    loss, grads = jax.value_and_grad(_loss)(model, x, y)
    optimizer.update(model, grads)
    return model, optimizer, loss


def _step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
    context = jaxdist.get_replica_context()
    loss, grads = jax.value_and_grad(_loss)(model, x, y)
    optimizer.update(model, context.all_reduce("mean", grads))
    return context.all_reduce("mean", loss)


def _make(layer: type[nnx.Module], mesh: Mesh) -> tuple[Any, Any, jax.Array, jax.Array]:
    rows = NamedSharding(mesh, P("data", None))
    with jax.set_mesh(mesh):
        model = Stack(layer, nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
        return model, optimizer, jax.device_put(X, rows), jax.device_put(Y, rows)


@functools.cache
def _losses_of_jit(layer: type[nnx.Module], mesh: Mesh) -> list[float]:
    model, optimizer, x, y = _make(layer, mesh)
    losses = []
    with jax.set_mesh(mesh):
        for _ in range(STEPS):
            model, optimizer, loss = _jitted_step(model, optimizer, x, y)
            losses.append(float(loss))
    return losses


@pytest.mark.parametrize(
    ("layer", "executor"),
    [
        (AutoLayer, "compiled"),
        pytest.param(AutoLayer, "under its mesh", marks=pytest.mark.long),
        pytest.param(AutoLayer, "op by op", marks=pytest.mark.long),
        (ExplicitLayer, "compiled"),
        (ExplicitLayer, "under its mesh"),
        pytest.param(ExplicitLayer, "op by op", marks=pytest.mark.long),
    ],
)
def test_a_model_written_for_the_whole_mesh_trains_as_under_jit(
    layer: type[nnx.Module], executor: str
) -> None:
    kind = AxisType.Auto if layer is AutoLayer else AxisType.Explicit
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind, kind))
    model, optimizer, x, y = _make(layer, mesh)
    strategy = jaxdist.MirroredStrategy(mesh=mesh, replica_axes=("data",))
    context = jax.set_mesh(mesh) if executor == "under its mesh" else contextlib.nullcontext()
    with context, jaxdist.config.run_eagerly(executor == "op by op"):
        losses = [float(strategy.run(_step, (model, optimizer, x, y))) for _ in range(STEPS)]
    expected = _losses_of_jit(layer, mesh)
    np.testing.assert_allclose(losses, expected, rtol=2e-6)
    assert expected[-1] < 0.95 * expected[0]
    assert tuple(model.layers.second.get_value().sharding.spec)[:2] == (None, "model")
