"""A decoder-only transformer over bytes, and its steps."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxdist import Sharded, partition
from jaxdist.jobs.topics_lm._attention import Attention, Cache
from jaxdist.jobs.topics_lm._schema import ModelConfig
from jaxdist.nn import embedding_lookup, example_keys, pipeline_loss, vocabulary_head
from jaxdist.training import reduce_and_update, weighted_sums

M = TypeVar("M", bound=nnx.Module)


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """How stacked layers run in micro-batches, on stages if the strategy has them."""

    stages: int = 1
    schedule: str = "1f1b"
    micro_batches: int = 0
    chunks: int = 1

    def choose_micro_batches(self, rows: int, *, must_be_asked: bool = True) -> int:
        """Return the number of micro-batches of `rows` rows.

        Without a configured one, it is the least divisor of the rows from 4 for each stage, so that
        a stage waits for less than a quarter of its time; or else the number of the rows.

        Args:
            rows: The rows of a replica.
            must_be_asked: Whether to return a configured number that does not divide the rows.

        Example:
            >>> Pipeline(stages=4).choose_micro_batches(48)
            16
        """
        if self.micro_batches and (must_be_asked or rows % self.micro_batches == 0):
            return self.micro_batches
        fitting = [n for n in range(1, rows + 1) if rows % n == 0]
        return next((n for n in fitting if n >= 4 * self.stages), max(rows, 1))


def stack(make: Callable[[nnx.Rngs], M], count: int, rngs: nnx.Rngs) -> M:
    """Return one layer that has the parameters of `count` layers, in a new dim 0.

    The parameters are those that `count` calls of `make(rngs)` would draw one after another.
    """
    graphdef, before = nnx.split(rngs)
    advanced = nnx.clone(rngs)
    made = make(advanced)
    after = nnx.state(advanced)

    def advance(number: Any) -> Any:
        """Return the state of the random streams before a layer."""

        # Streams count their draws, and each layer draws equally often. Their keys stay the same.
        def add(start: Any, end: Any) -> Any:
            is_count = jnp.issubdtype(start.dtype, jnp.integer)
            return start + (number * (end - start)).astype(start.dtype) if is_count else start

        return jax.tree.map(add, before, after)

    # One trace, for any number of layers.
    numbers = jnp.arange(count)
    nnx.update(made, jax.vmap(lambda n: nnx.state(make(nnx.merge(graphdef, advance(n)))))(numbers))
    nnx.update(rngs, advance(jnp.asarray(count)))
    for _, variable in nnx.iter_graph(made):
        if isinstance(variable, nnx.Variable):
            variable.set_metadata(stacked_layers=True)
    return made


def take(layers: M, number: int) -> M:
    """Return one of stacked layers, outside of a scan."""
    graphdef, state = nnx.split(layers)
    return nnx.merge(graphdef, jax.tree.map(lambda w: w[number], state))


_SPREAD = 0.02  # standard deviation of initial parameters


class Mlp(nnx.Module):
    """An up-projection, GELU, and a down-projection; or SiLU of a gate, times the up-projection."""

    def __init__(
        self, config: ModelConfig, *, out_init: Any, linear: dict[str, Any], rngs: nnx.Rngs
    ) -> None:
        width, hidden = config.width, config.hidden
        self.up = nnx.Linear(width, hidden, rngs=rngs, **linear)
        self.down = nnx.Linear(hidden, width, rngs=rngs, **{**linear, "kernel_init": out_init})
        self.is_gated = config.mlp == "gated"
        if self.is_gated:
            self.gate = nnx.Linear(width, hidden, rngs=rngs, **linear)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply the MLP: `[..., d]` in and out."""
        up = self.up(x)
        return self.down(nnx.silu(self.gate(x)) * up if self.is_gated else nnx.gelu(up))


class Layer(nnx.Module):
    """Attention and an MLP, each after a norm, and each added to its input."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        dtype = jnp.dtype(config.dtype)
        normal = nnx.initializers.normal(_SPREAD)
        # Every layer adds to the residual stream, so more layers need smaller initial outputs.
        out_init = nnx.initializers.normal(_SPREAD / math.sqrt(2 * config.layers))
        linear = {"use_bias": False, "kernel_init": normal, "dtype": dtype}
        self.attention_norm = nnx.RMSNorm(config.width, dtype=dtype, rngs=rngs)
        self.attention = Attention(config, out_init=out_init, linear=linear, rngs=rngs)
        self.mlp_norm = nnx.RMSNorm(config.width, dtype=dtype, rngs=rngs)
        self.mlp = Mlp(config, out_init=out_init, linear=linear, rngs=rngs)
        self.dropout, self.splits = config.dropout, config.split_residual

    def __call__(self, x: jax.Array, keys: jax.Array | None) -> jax.Array:
        """Apply the layer: `[b, s, d]` in and out. `keys` has a random key for each row.

        Without keys there is no dropout.
        """
        x = self._split(x)
        x = self._split(x + self._drop_out(self.attention(self.attention_norm(x)), keys, 0))
        return self._split(x + self._drop_out(self.mlp(self.mlp_norm(x)), keys, 1))

    def step(self, x: jax.Array, cache: Cache, position: jax.Array) -> tuple[jax.Array, Cache]:
        """Apply the layer to one position `[b, d]`, with the cache of the positions before it."""
        seen, cache = self.attention.step(self.attention_norm(x), cache, position)
        x = x + seen
        return x + self.mlp(self.mlp_norm(x)), cache

    def _split(self, x: jax.Array) -> jax.Array:
        """Split the positions over the logical devices of a replica, if configured."""
        if not self.splits:
            return x
        return partition.constrain(x, partition.Split(1))

    def _drop_out(self, x: jax.Array, keys: jax.Array | None, place: int) -> jax.Array:
        if keys is None or not self.dropout:
            return x
        kept = 1.0 - self.dropout

        # One key for each row, so that the mask of a row does not depend on the number of replicas.
        def mask(key: jax.Array) -> jax.Array:
            return jax.random.bernoulli(jax.random.fold_in(key, place), kept, x.shape[1:])

        return jnp.where(jax.vmap(mask)(keys), x / kept, 0).astype(x.dtype)


class Transformer(nnx.Module):
    """Bytes in, logits of the next byte out.

    Pre-norm (RMSNorm), rotary positions, no biases. The configuration chooses between GELU and a
    gate, and whether input and output share the embedding table. Parameters are float32
    and depend only on `rngs`; `config.dtype` is the dtype of the matrix products.

    Example:
        >>> config = ModelConfig(layers=1, width=16, heads=2, hidden=32)
        >>> model = Transformer(config, rngs=nnx.Rngs(0))
        >>> model(jnp.zeros((2, 5), jnp.int32)).shape
        (2, 5, 256)
    """

    def __init__(
        self, config: ModelConfig, *, rngs: nnx.Rngs, pipeline: Pipeline | None = None
    ) -> None:
        dtype = jnp.dtype(config.dtype)
        normal = nnx.initializers.normal(_SPREAD)
        self.embed = nnx.Embed(
            config.vocabulary, config.width, embedding_init=normal, dtype=dtype, rngs=rngs
        )
        self.layers: Any = (
            stack(lambda own: Layer(config, rngs=own), config.layers, rngs)
            if config.scan_layers
            else nnx.List(Layer(config, rngs=rngs) for _ in range(config.layers))
        )
        chunks = pipeline.chunks if pipeline else 1
        if chunks > 1 and config.layers % chunks == 0:
            in_chunks = jax.tree.map(
                lambda w: w.reshape(chunks, -1, *w.shape[1:]), nnx.state(self.layers)
            )
            nnx.update(self.layers, in_chunks)
        self.norm = nnx.RMSNorm(config.width, dtype=dtype, rngs=rngs)
        if config.output == "own":
            self.unembed = nnx.Linear(
                config.width,
                config.vocabulary,
                use_bias=False,
                kernel_init=normal,
                dtype=dtype,
                rngs=rngs,
            )
        self.config, self.pipeline = config, pipeline

    def __call__(self, tokens: jax.Array, keys: jax.Array | None = None) -> jax.Array:
        """Return float32 logits `[b, s, v]` of the byte after each of `tokens` `[b, s]`.

        Args:
            tokens: Integers from 0 to 255.
            keys: A random key for each row `[b]`, for dropout; None for no dropout.
        """
        x = self._embed(tokens)
        if self.config.scan_layers:
            return self._unembed(self._scan_layers(x, keys))
        run = _RUNS[self.config.remat]
        for number, layer in enumerate(self.layers):
            own = None if keys is None else _fold_keys(keys, number)
            x = run(layer, x, own)
        return self._unembed(x)

    def step(
        self, tokens: jax.Array, caches: list[Cache], position: jax.Array
    ) -> tuple[jax.Array, list[Cache]]:
        """Return logits `[b, v]` of the byte after `tokens` `[b]`, which are at `position`."""
        x = self._embed(tokens)
        after = []
        layers = self.layers
        if self.pipeline is not None:
            layers = self._join_chunks()
        for number, cache in enumerate(caches):
            layer = take(layers, number) if self.config.scan_layers else layers[number]
            x, new = layer.step(x, cache, position)
            after.append(new)
        return self._unembed(x), after

    def empty_caches(self, rows: int, slots: int) -> list[Cache]:
        """Return an empty cache for each layer."""
        config = self.config
        layers = [self.layers] * config.layers if config.scan_layers else self.layers
        return [layer.attention.empty_cache(rows, slots) for layer in layers]

    def weighted_loss(
        self, tokens: jax.Array, weights: jax.Array, key: jax.Array | None, micro_batches: int
    ) -> jax.Array:
        """Return the sum of the weighted losses of all bytes but the first, by micro-batches.

        Args:
            tokens: `[b, s + 1]`.
            weights: A weight of each byte that is predicted, `[b, s]`.
            key: The key of the step for dropout, or None.
            micro_batches: The number of micro-batches.
        """
        config, pipeline = self.config, self.pipeline or Pipeline()
        of_layer, layers = nnx.split(self.layers)
        of_norm, norm = nnx.split(self.norm)
        dtype = jnp.dtype(config.dtype)
        if config.output == "shared":
            table = self._gather_one(self.embed.embedding)
            matrix = table.T.astype(dtype)
        else:
            table = jax.tree.map(self._as_sums, self.embed.embedding.get_raw_value())
            kernel = jax.tree.map(self._as_sums, self.unembed.kernel.get_raw_value())
            matrix = jax.tree.map(lambda w: w.astype(dtype), kernel)

        def embed(table: jax.Array, rows: Batch) -> jax.Array:
            return jnp.take(table, rows["tokens"], axis=0).astype(dtype)

        def layer(w: Any, x: jax.Array, keys: jax.Array | None = None) -> jax.Array:
            return nnx.merge(of_layer, w)(x, keys)

        if config.remat != "none":
            # The engine differentiates a layer by itself, so XLA has nothing to merge it with.
            layer = jax.checkpoint(layer, policy=_POLICIES[config.remat], prevent_cse=False)

        head = vocabulary_head(
            lambda rows: rows["targets"],
            weights=lambda rows: rows["weights"],
            norm=lambda norm, x: nnx.merge(of_norm, norm)(x),
        )
        # Stages that cannot share the words equally compute the whole head, as any function.
        is_split = config.vocabulary % pipeline.stages == 0
        return pipeline_loss(
            embed,
            layer,
            head if is_split else lambda h, x, rows: head(h, x, rows),
            (table, jax.tree.map(self._as_sums, layers), (norm, matrix)),
            {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights},
            micro_batches=micro_batches,
            schedule=pipeline.schedule,
            chunks=pipeline.chunks,
            key=key if config.dropout else None,
            reduce="sum",
        )

    def _join_chunks(self) -> Any:
        """Return the layers as one stack `[layers, ...]`, whole on each device."""
        graphdef, state = nnx.split(self.layers)
        whole = partition.constrain(self._gather(state), partition.Replicate())
        if self.pipeline is not None and self.pipeline.chunks > 1:
            whole = jax.tree.map(lambda w: w.reshape(-1, *w.shape[2:]), whole)
        return nnx.merge(graphdef, whole)

    def _scan_layers(self, x: jax.Array, keys: jax.Array | None) -> jax.Array:
        """Apply all layers in one loop, whose body is compiled once."""
        graphdef, state = nnx.split(self._join_chunks() if self.pipeline else self.layers)

        def body(x: jax.Array, given: tuple[jax.Array, Any]) -> tuple[jax.Array, None]:
            number, row = given
            own = None if keys is None else _fold_keys(keys, number)
            return nnx.merge(graphdef, self._gather(row))(x, own), None

        policy = _POLICIES[self.config.remat]
        if self.config.remat != "none":
            # A loop is never merged with another one, so nothing has to prevent that.
            body = jax.checkpoint(body, policy=policy, prevent_cse=False)
        rows = jnp.arange(self.config.layers), jax.tree.map(self._as_sums, state)
        x, _ = jax.lax.scan(body, x, rows)
        return x

    def _gather(self, parameters: Any) -> Any:
        """Gather parameters; cast matrices to the dtype of the products first, to send less."""

        def gather(x: Any) -> Any:
            return partition.gather(x, dtype=self.config.dtype if x.ndim > 1 else None)

        return jax.tree.map(gather, parameters, is_leaf=lambda x: isinstance(x, Sharded))

    def _as_sums(self, parameter: Any) -> Any:
        """Cast a stack of matrices to the dtype in which gradients are summed over slices."""
        is_matrix = parameter.ndim > 1
        return parameter.astype(self.config.sums_between_slices) if is_matrix else parameter

    def _gather_one(self, variable: Any) -> jax.Array:
        array = jax.tree.map(self._as_sums, variable.get_raw_value())
        return self._gather(array)

    def _embed(self, tokens: jax.Array) -> jax.Array:
        if not self.config.scan_layers:
            return self.embed(tokens)
        table = jax.tree.map(self._as_sums, self.embed.embedding.get_raw_value())
        return embedding_lookup(table, tokens, dtype=self.config.dtype)

    def _unembed(self, x: jax.Array) -> jax.Array:
        x = self.norm(x)
        dtype = jnp.dtype(self.config.dtype)
        if self.config.output == "shared":
            table = self._gather_one(self.embed.embedding)
            return (x @ table.T.astype(dtype)).astype(jnp.float32)
        if not self.config.scan_layers:
            return self.unembed(x).astype(jnp.float32)
        kernel = self._gather_one(self.unembed.kernel)
        return (x @ kernel.astype(dtype)).astype(jnp.float32)


def _keep_products(primitive: Any, *_: Any, **params: Any) -> bool:
    """Policy for `jax.checkpoint` that keeps products with parameters, which have no batch dims."""
    if primitive.name != "dot_general":
        return False
    _, batch_dims = params["dimension_numbers"]
    return not any(batch_dims)


# What a layer keeps for the backward pass: everything; everything but gathered parameters;
# products with parameters; only its inputs.
_POLICIES: dict[str, Any] = {
    "none": None,
    "parameters": partition.remat_policy,
    "products": _keep_products,
    "layers": None,
}
_RUNS: dict[str, Any] = {
    name: Layer.__call__ if name == "none" else nnx.remat(Layer.__call__, policy=policy)
    for name, policy in _POLICIES.items()
}


def _fold_keys(keys: jax.Array, number: int | jax.Array) -> jax.Array:
    return jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, number)


Batch = dict[str, jax.Array]


def byte_losses(model: Transformer, tokens: jax.Array, keys: jax.Array | None = None) -> jax.Array:
    """Return the cross-entropy in nats of all bytes but the first: `[b, s]` of `[b, s + 1]`."""
    tokens = tokens.astype(jnp.int32)
    logits = model(tokens[:, :-1], keys)
    targets = tokens[:, 1:, None]
    # A sum over one-hot rows instead of a gather: the logits may be sharded over the vocabulary,
    # and XLA would all-gather them for a gather.
    is_target = jnp.arange(logits.shape[-1])[None, None] == targets
    chosen = jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
    return jax.nn.logsumexp(logits, axis=-1) - chosen


def train_step(model: Transformer, optimizer: "nnx.Optimizer[Any]", batch: Batch) -> jax.Array:
    """Update the model in place, and return the mean loss over the global batch's bytes `[]`."""
    tokens = batch["tokens"]
    keys = key = None
    if model.config.dropout:
        # The key depends only on the step: a resumed run has the dropout of an uninterrupted one.
        key = jax.random.fold_in(jax.random.key(0), optimizer.step.get_value())
        keys = None if model.pipeline else example_keys(key, tokens.shape[0])

    def total_loss(model: Transformer) -> jax.Array:
        if model.pipeline is None:
            return jnp.sum(byte_losses(model, tokens, keys))
        rows, whole = tokens.shape[0], jnp.ones(tokens[:, 1:].shape, jnp.float32)
        count = model.pipeline.choose_micro_batches(rows)
        return model.weighted_loss(tokens.astype(jnp.int32), whole, key, count)

    total, grads = nnx.value_and_grad(total_loss)(model)
    size = tokens[:, 1:].size
    count, total = reduce_and_update(model, optimizer, grads, size, total)
    return total / count


def evaluation_step(model: Transformer, batch: Batch, mask: jax.Array) -> Batch:
    """Return the sums over the real bytes of all replicas."""
    tokens, length = batch["tokens"], batch["length"]
    is_real = jnp.arange(tokens.shape[1] - 1)[None] < length[:, None]
    if model.pipeline is not None:
        weight = (mask * length).astype(jnp.float32)
        real = (is_real * mask[:, None]).astype(jnp.float32)
        count = model.pipeline.choose_micro_batches(tokens.shape[0], must_be_asked=False)
        total = model.weighted_loss(tokens.astype(jnp.int32), real, None, count)
        mean = total / jnp.maximum(jnp.sum(weight), 1)
        return weighted_sums({"loss": jnp.broadcast_to(mean, weight.shape)}, weight)
    losses = byte_losses(model, tokens)
    # Take the mean of each window, weighted by its length: the last window may be padded.
    means = jnp.sum(jnp.where(is_real, losses, 0.0), axis=1) / jnp.maximum(length, 1)
    return weighted_sums({"loss": means}, mask * length)
