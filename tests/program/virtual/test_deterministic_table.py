"""Common functions have the same bits on 1, 2, 4 and 8 devices: value and gradient."""

from typing import Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdist
from jaxdist import OneDeviceStrategy, PerReplica, Strategy, get_replica_context
from tests.program.virtual.exact_rows import (
    NO_ROW_OF_LOSSES,
    NO_ROW_OF_NN,
    NO_ROW_OF_NNX,
    Group,
    groups,
    layer_names,
    rows,
)
from tests.program.virtual.test_deterministic import bits, on_all, virtual
from tests.tables import sampled

pytestmark = pytest.mark.optimized


@pytest.mark.parametrize("group", sampled(groups(), 1))
def test_functions_and_their_gradients_have_the_same_bits(group: Group) -> None:
    step, given = group.step(), group.arguments()
    one = OneDeviceStrategy("cpu:3", deterministic=True).run(step, given)
    for devices in 2, 4, 8:
        other = virtual(devices).run(step, given)
        differ = [row.name for row in group.rows if bits(other[row.name]) != bits(one[row.name])]
        assert not differ, f"{devices} devices"


def test_the_gradient_of_a_softmax_has_the_same_bits_on_one_device() -> None:
    """XLA's simplifier chose between a division and a product by the number of devices."""
    x = np.random.default_rng(0).normal(size=(8, 16, 32)).astype(np.float32)
    w = np.random.default_rng(1).normal(size=(32, 12)).astype(np.float32)

    def step(w: Any, x: Any) -> Any:
        def loss(w: Any, x: Any) -> Any:
            return jnp.sum(jax.nn.softmax(x @ w) ** 2)

        of_w, of_x = jax.grad(loss, (0, 1))(w, x)
        return of_x, get_replica_context().all_reduce("mean", of_w)

    on_all(lambda strategy: strategy.run(step, (w, PerReplica(list(x)))), among=(2,))


@pytest.mark.parametrize("is_function", [False, True])
def test_a_repeated_division_has_the_same_bits_on_one_device(is_function: bool) -> None:
    """Shardy put the divisors together, for several devices only, before XLA's simplifier."""
    x = np.random.default_rng(2).normal(size=(8, 4, 24)).astype(np.float32)

    def step(x: Any) -> Any:
        value, pull_back = jax.vjp(lambda x: jnp.std(x, axis=-1), x)
        return value, pull_back(jnp.cos(jnp.arange(4.0)))

    def run(strategy: Strategy) -> Any:
        given = PerReplica(list(x))
        if is_function:
            return jaxdist.function(lambda x: strategy.run(step, (x,)))(given)
        return strategy.run(step, (given,))

    on_all(run, among=(2, 8))


def test_the_table_has_every_function_layer_and_loss() -> None:
    names = {row.name for row in rows()}
    of_nn = {n for n in dir(jax.nn) if not n.startswith("_") and callable(getattr(jax.nn, n))}
    of_losses = {n for n in dir(optax.losses) if not n.startswith("_")}
    of_losses = {n for n in of_losses if callable(getattr(optax.losses, n))}
    missing = {f"nn.{n}" for n in of_nn - NO_ROW_OF_NN.keys()} - names
    missing |= {f"nnx.{n}" for n in layer_names() - NO_ROW_OF_NNX.keys()} - names
    missing |= {f"optax.{n}" for n in of_losses - NO_ROW_OF_LOSSES.keys()} - names
    assert not missing


class Block(nnx.Module):
    """Attention and a perceptron, with dropout, as in a small transformer."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norms = nnx.List([nnx.LayerNorm(16, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(
            2, 16, dropout_rate=0.1, deterministic=False, decode=False, rngs=rngs
        )
        self.up, self.down = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 16, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        causal = nnx.make_causal_mask(jnp.ones(x.shape[:2]))
        x = x + self.dropout(self.attention(self.norms[0](x), mask=causal))
        return x + self.dropout(self.down(jax.nn.gelu(self.up(self.norms[1](x)))))


class Transformer(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(11, 16, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.last = nnx.Linear(16, 11, rngs=rngs)

    def __call__(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def _trained(strategy: Strategy, steps: int) -> Any:
    with strategy.scope():
        model = Transformer()
        optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)

    def step(model: Any, optimizer: Any, tokens: Any) -> Any:
        def loss(model: Any) -> Any:
            logits = model(tokens[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        own, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, get_replica_context().all_reduce("mean", grads))
        return own

    tokens = np.random.default_rng(3).integers(0, 11, (16, 9))
    given = PerReplica(list(tokens.reshape(8, 2, 9)))
    losses = [strategy.run(step, (model, optimizer, given)) for _ in range(steps)]
    return nnx.state((model, optimizer)), losses


@pytest.mark.slow
@pytest.mark.long
def test_a_transformer_with_dropout_trains_to_the_same_bits() -> None:
    _, losses = on_all(lambda strategy: _trained(strategy, 50), among=(2, 4, 8))
    first, last = (np.mean(np.asarray(x.array)) for x in (losses[0], losses[-1]))
    assert last < first
