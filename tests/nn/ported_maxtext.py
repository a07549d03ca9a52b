"""The scanned decoder of MaxText, restated: a stack of layers with documents and padding.

Source: github.com/AI-Hypercomputer/maxtext 0.2.5 (Apache-2.0): layers/nnx_scan.py (the stack and
its scan), layers/nnx_decoders.py (`NNXDecoderLayer`, whose MLP is beside its attention, and
`NNXDecoder`), trainers/pre_train/train.py (`loss_fn`, `train_step`). Without what its default
configuration turns off: quantization, dropout, losses beside the cross-entropy. The dim of the
layers is 0 (`param_scan_axis=0`; its default is 1).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxdist
from jaxdist import nn

EPS = 1e-8


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of the model."""

    emb_dim: int = 32
    mlp_dim: int = 64
    heads: int = 4
    num_decoder_layers: int = 8
    vocab_size: int = 64


def rotate(x: Any, positions: Any) -> Any:
    """Rotary embedding."""
    half = x.shape[-1] // 2
    rates = 10_000.0 ** (-jnp.arange(half) / half)
    angles = positions[..., None, None] * rates[None, None, None]
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


class DecoderLayer(nnx.Module):
    """Attention and a gated MLP of the same norm, added to the input."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        width, mlp = config.emb_dim, config.mlp_dim
        self.heads = config.heads
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.qkv = nnx.Linear(width, 3 * width, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(width, width, use_bias=False, rngs=rngs)
        self.wi = nnx.Linear(width, 2 * mlp, use_bias=False, rngs=rngs)
        self.wo = nnx.Linear(mlp, width, use_bias=False, rngs=rngs)
        self.dropout = nnx.Dropout(0.0, rngs=rngs)

    def __call__(self, x: Any, segments: Any, positions: Any, deterministic: bool) -> Any:
        lnx = self.norm(x)
        heads = self.qkv(lnx).reshape(*x.shape[:2], 3 * self.heads, -1)
        q, k, v = jnp.split(heads, 3, axis=2)
        q, k = rotate(q, positions), rotate(k, positions)
        same = segments[:, None, :, None] == segments[:, None, None, :]
        found = jax.nn.dot_product_attention(q, k, v, mask=same, is_causal=True)
        gate, up = jnp.split(self.wi(lnx), 2, axis=-1)
        added = self.out(found.reshape(x.shape)) + self.wo(jax.nn.silu(gate) * up)
        return x + self.dropout(added, deterministic=deterministic), None


def scan_layers(layers: Any, y: Any, *broadcast: Any) -> Any:
    """Run a stack of layers, one after the other."""
    graphdef, stack = nnx.split(layers)

    def body(y: Any, state: Any) -> Any:
        return nnx.merge(graphdef, state)(y, *broadcast)

    return jax.lax.scan(body, y, stack)[0]


class Decoder(nnx.Module):
    """The stack, and what comes after it."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        make = nnx.vmap(lambda rngs: DecoderLayer(config, rngs))
        self.layers = make(rngs.split(config.num_decoder_layers))
        self.decoder_norm = nnx.RMSNorm(config.emb_dim, rngs=rngs)
        self.logits_dense = nnx.Linear(config.emb_dim, config.vocab_size, use_bias=False, rngs=rngs)


class Model(nnx.Module):
    """Tokens to logits."""

    def __init__(self, config: Config) -> None:
        rngs = nnx.Rngs(0)
        self.token_embedder = nnx.Embed(config.vocab_size, config.emb_dim, rngs=rngs)
        self.decoder = Decoder(config, rngs)

    def __call__(self, tokens: Any, segments: Any, positions: Any) -> Any:
        y = self.token_embedder(tokens)
        y = scan_layers(self.decoder.layers, y, segments, positions, True)
        return self.decoder.logits_dense(self.decoder.decoder_norm(y))


def make_batches(count: int, rows: int = 16, length: int = 16) -> list[dict[str, Any]]:
    """Rows of two documents, and padding after them."""
    rng = np.random.default_rng(0)
    batches = []
    for _ in range(count):
        text = rng.integers(1, Config.vocab_size, (rows, length + 1)).astype("int32")
        text[:, 1::2] = text[:, :-1:2]
        second, end = rng.integers(4, 9, (rows, 1)), rng.integers(11, length + 1, (rows, 1))
        at = np.arange(length, dtype="int32")[None]
        segments = np.where(at < second, 1, np.where(at < end, 2, 0)).astype("int32")
        batches.append(
            {
                "inputs": text[:, :-1],
                "targets": text[:, 1:],
                "inputs_position": np.where(at < second, at, at - second).astype("int32"),
                "inputs_segmentation": segments,
                "targets_segmentation": segments,
            }
        )
    return batches


def original() -> tuple[Any, Any]:
    """The program on one device."""
    config = Config()

    def loss_fn(model: Any, data: Any) -> Any:
        logits = model(data["inputs"], data["inputs_segmentation"], data["inputs_position"])
        one_hot_targets = jax.nn.one_hot(data["targets"], config.vocab_size)
        xent = -jnp.sum(one_hot_targets * jax.nn.log_softmax(logits), axis=-1)
        xent = xent * (data["targets_segmentation"] != 0)
        xent_sum = jnp.sum(xent)
        total_weights = jnp.sum(data["targets_segmentation"] != 0)
        loss = xent_sum / (total_weights + EPS)
        return loss, {"xent_sum": xent_sum, "total_weights": total_weights}

    def train_step(model: Any, optimizer: Any, data: Any) -> Any:
        graphdef, params, rest = nnx.split(model, nnx.Param, ...)

        def diff_wrapper(params: Any) -> Any:
            return loss_fn(nnx.merge(graphdef, params, rest, copy=True), data)

        (loss, aux), grads = jax.value_and_grad(diff_wrapper, has_aux=True)(params)
        optimizer.update(model, grads)
        return loss, aux["total_weights"]

    return Model(config), train_step


def on_stages() -> tuple[Any, Any]:
    """Its layers are the stages of a pipeline."""
    config = Config()

    def loss_fn(model: Any, data: Any) -> Any:
        xent_sum = nn.pipeline_loss(
            lambda embedder, data: (
                embedder(data["inputs"]),
                data["inputs_segmentation"],
                data["inputs_position"],
            ),
            lambda layer, x: (layer(*x, True)[0], *x[1:]),
            nn.vocabulary_head(
                lambda data: data["targets"],
                weights=lambda data: data["targets_segmentation"] != 0,
                norm=lambda norm, x: norm(x[0]),
            ),
            (
                model.token_embedder,
                model.decoder.layers,
                (model.decoder.decoder_norm, model.decoder.logits_dense.kernel[...]),
            ),
            data,
            micro_batches=4,
            reduce="sum",
        )
        total_weights = jnp.sum(data["targets_segmentation"] != 0)
        total_weights = jaxdist.get_replica_context().all_reduce("sum", total_weights)
        loss = xent_sum / (total_weights + EPS)
        return loss, {"xent_sum": xent_sum, "total_weights": total_weights}

    def train_step(model: Any, optimizer: Any, data: Any) -> Any:
        graphdef, params, rest = nnx.split(model, nnx.Param, ...)

        def diff_wrapper(params: Any) -> Any:
            return loss_fn(nnx.merge(graphdef, params, rest, copy=True), data)

        (loss, aux), grads = jax.value_and_grad(diff_wrapper, has_aux=True)(params)
        loss, grads = jaxdist.get_replica_context().all_reduce("sum", (loss, grads))
        optimizer.update(model, grads)
        return loss, aux["total_weights"]

    return Model(config), train_step
