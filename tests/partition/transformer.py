"""A tiny byte-level transformer, with the paths that the ready rules know."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxdist
from jaxdist.partition import Replicate, constrain

VOCABULARY, WIDTH, HIDDEN, HEADS, LENGTH, ROWS = 32, 16, 32, 4, 8, 16


class Attention(nnx.Module):
    """Causal attention with kernels `[in, out]`."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        for name in ("query", "key", "value", "out"):
            setattr(self, name, nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs))

    def __call__(self, x: jax.Array) -> jax.Array:
        heads = [
            getattr(self, n)(x).reshape(*x.shape[:2], HEADS, WIDTH // HEADS)
            for n in ("query", "key", "value")
        ]
        mixed = jax.nn.dot_product_attention(*heads, is_causal=True)
        result: jax.Array = self.out(mixed.reshape(x.shape))  # type: ignore[attr-defined]
        return result


class Block(nnx.Module):
    """Attention and an MLP."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.attention_norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.attention = Attention(rngs)
        self.mlp_norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.mlp = nnx.Dict(
            up=nnx.Linear(WIDTH, HIDDEN, rngs=rngs), down=nnx.Linear(HIDDEN, WIDTH, rngs=rngs)
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        x = constrain(x + self.attention(self.attention_norm(x)), Replicate())
        hidden = constrain(self.mlp.up(self.mlp_norm(x)), -1)
        result: jax.Array = constrain(x + self.mlp.down(jax.nn.gelu(hidden)), Replicate())
        return result


class Transformer(nnx.Module):
    """Next-byte logits."""

    def __init__(self, rngs: nnx.Rngs, num_layers: int = 2) -> None:
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.layers = nnx.List([Block(rngs) for _ in range(num_layers)])
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.unembed = nnx.Linear(WIDTH, VOCABULARY, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = constrain(self.embed(tokens), Replicate())
        for layer in self.layers:
            x = layer(x)
        logits: jax.Array = self.unembed(self.norm(x))
        return logits


def filled(make: Callable[[], Any]) -> Any:
    """What `make` makes, with numbers of NumPy: initializers would be compiled one by one."""
    rng = np.random.default_rng(0)

    def numbers(x: Any) -> Any:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return np.zeros(x.shape, x.dtype)
        scale = 0.5 if len(x.shape) < 2 else x.shape[0] ** -0.5
        return (len(x.shape) == 1) * 0.5 + scale * rng.normal(size=x.shape).astype(x.dtype)

    made = nnx.eval_shape(make)
    nnx.update(made, jax.tree.map(numbers, nnx.state(made)))
    return made


def loss_of(model: Transformer, tokens: jax.Array) -> jax.Array:
    """Mean cross entropy of the next byte."""
    logits = model(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def train_step(model: Transformer, optimizer: Any, tokens: jax.Array) -> jax.Array:
    """One step, the same for data parallelism, FSDP and tensor parallelism."""
    loss, grads = nnx.value_and_grad(loss_of)(model, tokens)
    loss, grads = jaxdist.get_replica_context().all_reduce("mean", (loss, grads))
    optimizer.update(model, grads)
    return jnp.asarray(loss)


def batches(count: int) -> np.ndarray:
    """Text that can be learned: `[count, ROWS, LENGTH + 1]`."""
    rng = np.random.default_rng(0)
    starts = rng.integers(0, VOCABULARY, size=(count, ROWS, 1))
    return ((starts + 3 * np.arange(LENGTH + 1)) % VOCABULARY).astype("int32")
