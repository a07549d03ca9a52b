"""The two models of the training rows, the same in every arm: weights and data from one seed."""

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Params = Any
Batch = tuple[Any, Any]
Loss = Callable[[Params, Batch], jax.Array]

LEARNING_RATE = 0.05


def mlp(global_batch: int = 256) -> tuple[Params, Batch, Loss]:
    """784-512-512-10: 670k parameters, 2.7 MB."""
    rng = np.random.default_rng(0)
    widths = (784, 512, 512, 10)
    params = {
        f"layer{i}": {
            "w": rng.normal(0, fan_in**-0.5, (fan_in, fan_out)).astype("float32"),
            "b": np.zeros(fan_out, "float32"),
        }
        for i, (fan_in, fan_out) in enumerate(itertools.pairwise(widths))
    }
    images = rng.normal(size=(global_batch, 784)).astype("float32")
    labels = rng.integers(0, 10, global_batch).astype("int32")
    return params, (images, labels), _mlp_loss


def _mlp_loss(params: Params, batch: Batch) -> jax.Array:
    x, labels = batch
    for i in range(3):
        layer = params[f"layer{i}"]
        x = x @ layer["w"] + layer["b"]
        x = jax.nn.relu(x) if i < 2 else x
    return _cross_entropy(x, labels)


def transformer(
    global_batch: int = 16,
    *,
    width: int = 384,
    layers: int = 5,
    vocabulary: int = 2048,
    length: int = 32,
) -> tuple[Params, Batch, Loss]:
    """A decoder of 9.65M parameters, 38.6 MB."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(0, shape[0] ** -0.5, shape).astype("float32")

    def layer() -> dict[str, np.ndarray]:
        return {
            "scale1": np.ones(width, "float32"),
            "qkv": normal(width, 3 * width),
            "out": normal(width, width),
            "scale2": np.ones(width, "float32"),
            "up": normal(width, 4 * width),
            "down": normal(4 * width, width),
        }

    params = {
        "tokens": (normal(width, vocabulary).T).copy(),
        "places": normal(width, length).T.copy(),
        "layers": [layer() for _ in range(layers)],
        "scale": np.ones(width, "float32"),
    }
    tokens = rng.integers(0, vocabulary, (global_batch, length)).astype("int32")
    return params, (tokens, np.roll(tokens, -1, axis=1)), _transformer_loss


def _transformer_loss(params: Params, batch: Batch) -> jax.Array:
    tokens, targets = batch
    x = params["tokens"][tokens] + params["places"]
    for layer in params["layers"]:
        x = x + _attention(_normalised(x, layer["scale1"]), layer)
        x = x + jax.nn.gelu(_normalised(x, layer["scale2"]) @ layer["up"]) @ layer["down"]
    return _cross_entropy(_normalised(x, params["scale"]) @ params["tokens"].T, targets)


def _attention(x: jax.Array, layer: Mapping[str, jax.Array], heads: int = 6) -> jax.Array:
    batch, length, width = x.shape
    split = (x @ layer["qkv"]).reshape(batch, length, 3, heads, width // heads)
    q, k, v = split[:, :, 0], split[:, :, 1], split[:, :, 2]
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (width // heads) ** -0.5
    scores = jnp.where(jnp.tri(length, dtype=bool), scores, -1e9)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
    return mixed.reshape(batch, length, width) @ layer["out"]


def _normalised(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1)
    return -jnp.mean(chosen)


def model(name: str) -> tuple[Params, Batch, Loss]:
    """A model by its name; `tiny` is a small MLP's batch for smoke runs."""
    if name == "tiny":
        return transformer(8, width=12, layers=1, vocabulary=16, length=4)
    return {"mlp": mlp, "transformer": transformer}[name]()


def sgd(params: Params, grads: Params) -> Params:
    """One step of plain gradient descent."""
    return jax.tree.map(lambda p, g: p - LEARNING_RATE * g, params, grads)
