"""The mixture of experts of a public notebook, restated: all experts compute all tokens.

Source: github.com/novastar53/jaxpt, notebooks/basic_moe.ipynb, commit 33aa4b96, first model. This
version has 8 experts instead of 2, each token chooses 2 of them, and sizes are small. The notebook
also returns the sum of squared mean logits, which is not in its loss; it is left out here.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jaxdist
from jaxdist import nn

EXPERTS, WIDTH, ROWS, TOKENS = 8, 8, 8, 16


class Parts(nnx.Module):
    """A router with a bias, and experts in a list."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.router = nnx.Linear(WIDTH, EXPERTS, rngs=rngs)
        self.experts: Any = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(EXPERTS)])
        self.top_k = 2

    def stack(self) -> None:
        """Make one stack of the experts, as `nnx.vmap` would have made it."""
        graphs, states = zip(*map(nnx.split, self.experts), strict=True)
        self.experts = nnx.merge(graphs[0], jax.tree.map(lambda *x: jnp.stack(x), *states))


def make_batches(count: int) -> list[tuple[Any, Any]]:
    """Tokens, and one of two products of each: the sign of its first number says which."""
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (count, ROWS, TOKENS, WIDTH))
    first, second = (x @ jax.random.normal(key, (WIDTH, WIDTH)) for key in keys[1:])
    return [*zip(x, jnp.where(x[..., :1] > 0, first, second), strict=True)]


def original() -> tuple[Any, Any]:
    """The program on one device."""

    class Model(Parts):
        def __call__(self, x: Any) -> Any:
            gate_logits = self.router(x)
            top_logits, chosen = jax.lax.top_k(gate_logits, self.top_k)
            empty = jnp.full_like(gate_logits, -jnp.inf)
            sparse = jnp.put_along_axis(empty, chosen, top_logits, axis=-1, inplace=False)
            gates = jax.nn.softmax(sparse, axis=-1)
            outputs = [expert(x) for expert in self.experts]
            result = jnp.zeros_like(x)
            for i, output in enumerate(outputs):
                result += output * gates[:, :, i : i + 1]
            return result, gates

    def loss_fn(model: Any, x: Any, y: Any) -> Any:
        predicted, gates = model(x)
        loss = jnp.mean((y - predicted) ** 2)
        return loss, gates

    @nnx.jit
    def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        (loss, gates), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model, x, y)
        optimizer.update(model, grads)
        return loss, gates

    return Model(), step


def over_devices() -> tuple[Any, Any]:
    """Each device has some of the experts."""

    class Model(Parts):
        def __call__(self, x: Any) -> Any:
            gate_logits = self.router(x)
            top_logits, chosen = jax.lax.top_k(gate_logits, self.top_k)
            empty = jnp.full_like(gate_logits, -jnp.inf)
            sparse = jnp.put_along_axis(empty, chosen, top_logits, axis=-1, inplace=False)
            gates = jax.nn.softmax(sparse, axis=-1)
            result, _ = nn.experts(
                lambda expert, rows: expert(rows),
                self.router,
                self.experts,
                x,
                top_k=self.top_k,
                capacity=None,
            )
            return result, gates

    def loss_fn(model: Any, x: Any, y: Any) -> Any:
        predicted, gates = model(x)
        loss = jnp.mean((y - predicted) ** 2)
        return loss, gates

    @nnx.jit
    def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        (loss, gates), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model, x, y)
        loss, grads = jaxdist.get_replica_context().all_reduce("mean", (loss, grads))
        optimizer.update(model, grads)
        return loss, gates

    return Model(), step
