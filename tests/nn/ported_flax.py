"""The miniGPT of Flax's examples, restated: its layers on stages, or its positions divided.

Source: github.com/google/flax, docs_nnx/examples/minigpt.ipynb in version 0.12.8 (Apache-2.0).
The model and its step are those of the example, without dropout and sampling; sizes and tokens are
small and random.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P
from jax.sharding import reshard

import jaxdist
from jaxdist import nn

LENGTH, WORDS, WIDTH, HEADS, BLOCKS, ROWS = 16, 64, 32, 4, 4, 16


class Block(nnx.Module):
    """Attention and an MLP, each with a norm after it."""

    def __init__(self, rngs: nnx.Rngs, attention_fn: Any) -> None:
        split: Any = {
            "kernel_metadata": {"out_sharding": P(None, "model")},
            "bias_metadata": {"out_sharding": P("model")},
        }
        norm: Any = {
            "scale_metadata": {"out_sharding": P("model")},
            "bias_metadata": {"out_sharding": P("model")},
        }
        self.mha = nnx.MultiHeadAttention(
            HEADS, WIDTH, attention_fn=attention_fn, rngs=rngs, **split
        )
        self.layer_norm1 = nnx.LayerNorm(WIDTH, rngs=rngs, **norm)
        self.mlp = nnx.Sequential(
            nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs, **split),
            nnx.relu,
            nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs, **split),
        )
        self.layer_norm2 = nnx.LayerNorm(WIDTH, rngs=rngs, **norm)

    def __call__(self, x: Any) -> Any:
        out = self.layer_norm1(x + self.mha(x, is_causal=True, decode=False))
        return self.layer_norm2(out + self.mlp(out))


class Parts(nnx.Module):
    """What the model has; each program says how it computes."""

    def __init__(
        self,
        embedding_class: Callable[[nnx.Rngs], nnx.Module],
        attention_fn: Any = nnx.dot_product_attention,
    ) -> None:
        rngs = nnx.Rngs(0)
        self.embedding_layer = embedding_class(rngs)
        self.transformer_blocks: Any = nnx.Sequential(
            *[Block(rngs, attention_fn) for _ in range(BLOCKS)]
        )
        self.output_layer = nnx.Linear(
            WIDTH, WORDS, kernel_metadata={"out_sharding": P(None, "model")}, rngs=rngs
        )

    def stack(self) -> None:
        """Make one stack of the blocks, as `nnx.vmap` would have made it."""
        graphs, states = zip(*map(nnx.split, self.transformer_blocks.layers), strict=True)
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
        self.transformer_blocks = nnx.merge(graphs[0], stacked)


class Tables(nnx.Module):
    """Embeddings of tokens and of positions."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.token_emb = nnx.Embed(WORDS, WIDTH, rngs=rngs)
        self.pos_emb = nnx.Embed(LENGTH, WIDTH, rngs=rngs)


def make_batches(count: int) -> list[tuple[Any, Any]]:
    """Tokens, every second of which is that before it, and the tokens after them."""
    rng = np.random.default_rng(0)
    text = rng.integers(0, WORDS, (count, ROWS, LENGTH + 1)).astype("int32")
    text[..., 1::2] = text[..., :-1:2]
    return [(t[:, :-1], t[:, 1:]) for t in text]


def original() -> tuple[Any, Any]:
    """The program on one device."""

    class Embedding(Tables):
        def __call__(self, x: Any) -> Any:
            positions = jnp.arange(0, x.shape[1])[None, :]
            position_embedding = self.pos_emb(positions)
            token_embedding = self.token_emb(x, out_sharding=jax.typeof(x).sharding)
            return token_embedding + position_embedding

    class Model(Parts):
        def __call__(self, inputs: Any) -> Any:
            x = self.embedding_layer(inputs)
            x = self.transformer_blocks(x)
            return reshard(self.output_layer(x), jax.typeof(inputs).sharding)

    def loss_fn(model: Any, batch: Any) -> Any:
        logits = model(batch[0])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch[1])
        loss = losses.mean()
        return loss, logits

    def train_step(model: Any, optimizer: Any, metrics: Any, batch: Any) -> None:
        grad_fn = nnx.value_and_grad(loss_fn, has_aux=True)
        (loss, logits), grads = grad_fn(model, batch)
        metrics.update(loss=loss, logits=logits, labels=batch[1])
        optimizer.update(model, grads)

    return Model(Embedding), train_step


def on_stages() -> tuple[Any, Any]:
    """Its blocks are the stages of a pipeline."""

    class Embedding(Tables):
        def __call__(self, x: Any) -> Any:
            positions = jnp.arange(0, x.shape[1])[None, :]
            position_embedding = self.pos_emb(positions)
            token_embedding = self.token_emb(x)
            return token_embedding + position_embedding

    class Model(Parts):
        def __call__(self, inputs: Any) -> Any:
            x = self.embedding_layer(inputs)
            x = self.transformer_blocks(x)
            return reshard(self.output_layer(x), jax.typeof(inputs).sharding)

    def head(output_layer: Any, x: Any, batch: Any) -> Any:
        logits = output_layer(x)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch[1])
        loss = losses.mean()
        return loss, logits

    def loss_fn(model: Any, batch: Any) -> Any:
        return nn.pipeline_loss(
            lambda embedding, batch: embedding(batch[0]),
            lambda block, x: block(x),
            head,
            (model.embedding_layer, model.transformer_blocks, model.output_layer),
            batch,
            micro_batches=4,
            has_aux=True,
        )

    def train_step(model: Any, optimizer: Any, metrics: Any, batch: Any) -> None:
        grad_fn = nnx.value_and_grad(loss_fn, has_aux=True)
        (loss, logits), grads = grad_fn(model, batch)
        loss, grads = jaxdist.get_replica_context().all_reduce("mean", (loss, grads))
        metrics.update(loss=loss, logits=logits, labels=batch[1])
        optimizer.update(model, grads)

    return Model(Embedding), train_step


def over_positions() -> tuple[Any, Any]:
    """Its positions are divided."""

    class Embedding(Tables):
        def __call__(self, x: Any) -> Any:
            positions = jnp.arange(0, x.shape[1])[None, :]
            position_embedding = self.pos_emb(positions)
            token_embedding = self.token_emb(x)
            return token_embedding + position_embedding

    class Model(Parts):
        def __call__(self, inputs: Any) -> Any:
            x = self.embedding_layer(inputs)
            x = self.transformer_blocks(x)
            return self.output_layer(x)

    def loss_fn(model: Any, batch: Any) -> Any:
        batch = nn.split_positions(batch, order="contiguous")
        logits = model(batch[0])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch[1])
        loss = losses.mean()
        return loss, logits

    def train_step(model: Any, optimizer: Any, metrics: Any, batch: Any) -> None:
        grad_fn = nnx.value_and_grad(loss_fn, has_aux=True)
        (loss, logits), grads = grad_fn(model, batch)
        loss, grads = jaxdist.get_replica_context().all_reduce("mean", (loss, grads))
        metrics.update(loss=loss, logits=logits, labels=batch[1])
        optimizer.update(model, grads)

    return Model(Embedding, lambda q, k, v, **_: nn.attention(q, k, v, causal=True)), train_step
