"""Flax layers that write normalized weights into the layer they wrap, in every layout."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxdist
from jaxdist import get_replica_context, partition
from jaxdist.errors import StateDivergenceError

X = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)


def _linear() -> Any:
    # 7 features are padded on 4 replicas.
    return nnx.Linear(6, 7, rngs=nnx.Rngs(0))


def _conv() -> Any:
    return nnx.Conv(2, 4, (3,), rngs=nnx.Rngs(0))


def _make(norm: Any, layer: Callable[[], Any]) -> Any:
    return norm(layer(), rngs=nnx.Rngs(1))


def _update(model: Any, optimizer: Any, x: Any, mean: Callable[[Any], Any]) -> Any:
    x = x if isinstance(model.layer_instance, nnx.Linear) else x.reshape(-1, 3, 2)
    loss, grads = mean(nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(model))
    optimizer.update(model, grads)
    return loss


def _on_replicas(model: Any, optimizer: Any, x: Any) -> Any:
    context = get_replica_context()
    return _update(model, optimizer, x, lambda tree: context.all_reduce("mean", tree))


def _strategy(layout: str) -> tuple[Any, Any]:
    if layout == "hsdp":
        mesh = jax.make_mesh((2, 2), ("group", "data"), devices=jax.devices()[:4])
        strategy = jaxdist.MirroredStrategy(mesh=mesh, replica_axes=("group", "data"))
        return strategy, partition.fsdp(min_bytes=0, axes=("data",))
    rules = partition.replicated() if layout == "replicated" else partition.fsdp(min_bytes=0)
    return jaxdist.MirroredStrategy([f"cpu:{i}" for i in range(4)]), rules


# Op by op is slow.
ROWS = [
    *itertools.product([_linear, _conv], ["replicated", "fsdp", "hsdp"], [False]),
    (_linear, "fsdp", True),
]


@pytest.mark.parametrize(("layer", "layout", "by_ops"), ROWS)
@pytest.mark.parametrize("norm", [nnx.SpectralNorm, nnx.WeightNorm])
def test_normalized_weights_train_as_on_one_device(
    norm: Any, layer: Callable[[], Any], layout: str, by_ops: bool
) -> None:
    alone = _make(norm, layer)
    own = nnx.Optimizer(alone, optax.adamw(0.1), wrt=nnx.Param)
    train = nnx.jit(lambda m, o, x: _update(m, o, x, lambda tree: tree))
    expected = [float(train(alone, own, X)) for _ in range(3)]
    strategy, rules = _strategy(layout)
    model = _make(norm, layer)
    partition.place(strategy, model, rules)
    with strategy.scope():
        optimizer = nnx.Optimizer(model, optax.adamw(0.1), wrt=nnx.Param)
    rows = jax.device_put(X, strategy.per_replica_sharding)
    jaxdist.config.run_eagerly(by_ops)
    try:
        losses = [float(strategy.run(_on_replicas, (model, optimizer, rows))) for _ in range(3)]
    finally:
        jaxdist.config.run_eagerly(False)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    held = jax.tree.leaves(nnx.state(model, nnx.Param))
    for got, wanted in zip(held, jax.tree.leaves(nnx.state(alone, nnx.Param)), strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-4)
    kernel = model.layer_instance.kernel.get_raw_value()
    assert isinstance(kernel, jax.Array if layout == "replicated" else jaxdist.Sharded)


def test_a_variable_in_pieces_takes_values_outside_of_a_step() -> None:
    strategy, rules = _strategy("fsdp")
    layer = _linear()
    partition.place(strategy, layer, rules)
    layer.kernel[...] = jnp.ones((6, 7))
    layer.kernel[0] = 2.0
    out = strategy.run(lambda m, x: m(x), (layer, jnp.ones((2, 6))))
    np.testing.assert_allclose(out, np.full((2, 7), 7.0))


def test_a_step_may_write_rows_of_a_variable_in_pieces() -> None:
    strategy, rules = _strategy("fsdp")
    layer = _linear()
    partition.place(strategy, layer, rules)

    def step(layer: Any) -> Any:
        layer.kernel[...] = jnp.ones((6, 7))
        layer.kernel[0] = 2.0
        return layer(jnp.ones((2, 6)))

    np.testing.assert_allclose(strategy.run(step, (layer,)), np.full((2, 7), 7.0))
    held: Any = layer.kernel.get_raw_value()
    np.testing.assert_array_equal(held.whole(), np.ones((6, 7)) + (np.arange(6) == 0)[:, None])


class _WithTable(nnx.Module):
    def __init__(self) -> None:
        self.table = nnx.data({"counts": jnp.zeros(3)})
        self.scale = nnx.Param(jnp.ones(()))


def test_an_array_outside_of_variables_is_updated() -> None:
    strategy, _ = _strategy("replicated")
    model = _WithTable()

    def step(model: Any) -> Any:
        model.table["counts"] = model.table["counts"] + 1
        return model.table["counts"] * model.scale[...]

    for number in (1, 2, 3):
        np.testing.assert_array_equal(strategy.run(step, (model,)), np.full(3, number))
    np.testing.assert_array_equal(model.table["counts"], np.full(3, 3))
    model.table["counts"] = jnp.zeros(3)
    np.testing.assert_array_equal(strategy.run(step, (model,)), np.ones(3))


@pytest.mark.parametrize("by_ops", [False, True])
def test_an_array_outside_of_variables_that_would_differ_is_refused(by_ops: bool) -> None:
    strategy, _ = _strategy("replicated")
    model = _WithTable()

    def step(model: Any, x: Any) -> None:
        model.table["counts"] = model.table["counts"] + x.sum()

    jaxdist.config.run_eagerly(by_ops)
    try:
        with pytest.raises(StateDivergenceError, match="counts"):
            strategy.run(step, (model, jax.device_put(X, strategy.per_replica_sharding)))
    finally:
        jaxdist.config.run_eagerly(False)
    np.testing.assert_array_equal(model.table["counts"], np.zeros(3))
