"""Several updates of an `nnx.Optimizer` in one step give the numbers of whole arrays."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxdist
from jaxdist import partition

OPTIMIZERS: dict[str, optax.GradientTransformation] = {
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adam": optax.adam(0.01),
    "adamw": optax.adamw(0.01),
    "multi_steps": optax.MultiSteps(optax.adam(0.01), 2).gradient_transformation(),
    "masked": optax.masked(optax.adam(0.01), lambda p: jax.tree.map(lambda x: True, p)),
}
_X = np.random.default_rng(0).normal(size=(8, 6)).astype("float32")


def _make_strategy(layout: str) -> tuple[Any, Any]:
    if layout == "hsdp":
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
        strategy = jaxdist.MirroredStrategy(mesh=mesh, replica_axes=("a", "b"))
        return strategy, partition.fsdp(min_bytes=0, axes=("b",))
    rules: Any = partition.replicated() if layout == "whole" else partition.fsdp(min_bytes=0)
    return jaxdist.MirroredStrategy([f"cpu:{i}" for i in range(4)]), rules


class _Nets(nnx.Module):
    def __init__(self) -> None:
        self.critic = nnx.Linear(6, 5, rngs=nnx.Rngs(0))
        self.maker = nnx.Linear(6, 6, rngs=nnx.Rngs(1))


def _train(name: str, layout: str, *, eagerly: bool) -> list[np.ndarray]:
    """A critic with three updates in each step, and a maker with one, as in a Wasserstein GAN."""
    strategy, rules = _make_strategy(layout)
    nets = _Nets()
    of_critic = nnx.Optimizer(nets.critic, OPTIMIZERS[name], wrt=nnx.Param)
    of_maker = nnx.Optimizer(nets.maker, OPTIMIZERS[name], wrt=nnx.Param)
    partition.place(strategy, (nets, of_critic, of_maker), rules)

    def step(nets: Any, of_critic: Any, of_maker: Any, x: Any) -> None:
        replica = jaxdist.get_replica_context()
        for number in range(3):

            def loss_of_critic(critic: Any, number: int = number) -> Any:
                return jnp.mean(critic(nets.maker(x)) ** 2 - number * critic(x))

            grads = nnx.grad(loss_of_critic)(nets.critic)
            of_critic.update(nets.critic, replica.all_reduce("mean", grads))
        grads = nnx.grad(lambda maker: -jnp.mean(nets.critic(maker(x)) ** 2))(nets.maker)
        of_maker.update(nets.maker, replica.all_reduce("mean", grads))

    x = jax.device_put(_X, strategy.per_replica_sharding)
    with jaxdist.config.run_eagerly(eagerly):
        for _ in range(2):
            strategy.run(step, (nets, of_critic, of_maker, x))
    found = []
    for _, variable in nnx.iter_graph((nets, of_critic, of_maker)):
        if isinstance(variable, nnx.Variable):
            held: Any = variable.get_raw_value()
            found.append(np.asarray(held.whole() if isinstance(held, jaxdist.Sharded) else held))
    return found


_ROWS = [(name, layout, False) for name in OPTIMIZERS for layout in ("fsdp", "hsdp")]
_ROWS += [("adam", layout, True) for layout in ("fsdp", "hsdp")]


@pytest.mark.parametrize(("name", "layout", "eagerly"), _ROWS)
def test_several_updates_in_one_step_are_those_of_whole_arrays(
    name: str, layout: str, eagerly: bool
) -> None:
    found, wanted = (_train(name, x, eagerly=eagerly) for x in (layout, "whole"))
    assert len(found) == len(wanted) > 8
    for have, want in zip(found, wanted, strict=True):
        np.testing.assert_allclose(have, want, rtol=2e-4, atol=1e-6)
