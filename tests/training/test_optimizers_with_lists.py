"""`multi_step` of optimizers whose state holds lists, which `nnx.Optimizer` replaces by states."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxdist
from jaxdist.errors import ShapeError
from jaxdist.training import multi_step
from tests.strategies.oracle import refused

TRANSFORMATIONS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "sm3": lambda: optax.sm3(0.1),
    "clip, sm3": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.sm3(0.1)),
    "MultiSteps of sm3": lambda: optax.MultiSteps(optax.sm3(0.1), 2).gradient_transformation(),
    "adam": lambda: optax.adam(0.1),
}


def _make(name: str) -> tuple[nnx.Linear, nnx.Optimizer[Any]]:
    model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    return model, nnx.Optimizer(model, TRANSFORMATIONS[name](), wrt=nnx.Param)


def _step(state: Any, x: Any) -> tuple[Any, Any]:
    model, optimizer = state
    loss, grads = nnx.value_and_grad(lambda m: (m(x) ** 2).sum() / 8)(model)
    context = jaxdist.get_replica_context()
    optimizer.update(model, context.all_reduce("sum", grads))
    return state, context.all_reduce("sum", loss)


@pytest.mark.parametrize("name", TRANSFORMATIONS)
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_many_steps_in_one_dispatch_are_the_steps_one_by_one(name: str, num_replicas: int) -> None:
    strategy = jaxdist.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)])
    x = np.random.default_rng(0).normal(size=(3, 8, 4)).astype(np.float32)
    batches = [jax.device_put(b, strategy.per_replica_sharding) for b in x]
    found, wanted = _make(name), _make(name)

    def run_one(model: Any, optimizer: Any, batch: Any) -> Any:
        return _step((model, optimizer), batch)[1]

    losses = [strategy.run(run_one, (*wanted, b)) for b in batches]
    structure = jax.tree.structure(nnx.state(found))
    many = multi_step(_step)

    def run_all(model: Any, optimizer: Any, batches: Any) -> Any:
        return many((model, optimizer), batches)[1]

    stacked = strategy.run(run_all, (*found, batches))
    np.testing.assert_allclose(stacked, jnp.stack(losses), rtol=1e-5)
    pairs = zip(jax.tree.leaves(nnx.state(found)), jax.tree.leaves(nnx.state(wanted)), strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert jax.tree.structure(nnx.state(found)) == structure
    strategy.run(run_all, (*found, batches))


def test_a_list_that_becomes_a_tuple_is_refused() -> None:
    class Holder(nnx.Module):
        def __init__(self) -> None:
            self.v = nnx.Variable([jnp.zeros(2), jnp.ones(2)])

    def swap(node: Any, x: Any) -> tuple[Any, Any]:
        node.v.set_value(tuple(node.v.get_value()))
        return node, x

    with refused(ShapeError, "multi_step", "step_fn"):
        multi_step(swap)(Holder(), [jnp.ones(1), jnp.ones(1)])
