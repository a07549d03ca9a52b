"""A decoder-only transformer over bytes, and its steps."""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxdist import Sharded, partition
from jaxdist.jobs.topics_lm._attention import Attention, Cache
from jaxdist.jobs.topics_lm._schema import ModelConfig
from jaxdist.nn import embedding_lookup, example_keys
from jaxdist.training import reduce_and_update, weighted_sums

M = TypeVar("M", bound=nnx.Module)


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

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
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
        self.config = config

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
        for number, cache in enumerate(caches):
            layer = take(self.layers, number) if self.config.scan_layers else self.layers[number]
            x, new = layer.step(x, cache, position)
            after.append(new)
        return self._unembed(x), after

    def empty_caches(self, rows: int, slots: int) -> list[Cache]:
        """Return an empty cache for each layer."""
        config = self.config
        layers = [self.layers] * config.layers if config.scan_layers else self.layers
        return [layer.attention.empty_cache(rows, slots) for layer in layers]

    def _scan_layers(self, x: jax.Array, keys: jax.Array | None) -> jax.Array:
        """Apply all layers in one loop, whose body is compiled once."""
        graphdef, state = nnx.split(self.layers)

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
    keys = None
    if model.config.dropout:
        # The key depends only on the step: a resumed run has the dropout of an uninterrupted one.
        key = jax.random.fold_in(jax.random.key(0), optimizer.step.get_value())
        keys = example_keys(key, tokens.shape[0])

    def total_loss(model: Transformer) -> jax.Array:
        return jnp.sum(byte_losses(model, tokens, keys))

    total, grads = nnx.value_and_grad(total_loss)(model)
    size = tokens[:, 1:].size
    count, total = reduce_and_update(model, optimizer, grads, size, total)
    return total / count


def evaluation_step(model: Transformer, batch: Batch, mask: jax.Array) -> Batch:
    """Return the sums over the real bytes of all replicas."""
    losses = byte_losses(model, batch["tokens"])
    length = batch["length"]
    is_real = jnp.arange(losses.shape[1])[None] < length[:, None]
    # Take the mean of each window, weighted by its length: the last window may be padded.
    means = jnp.sum(jnp.where(is_real, losses, 0.0), axis=1) / jnp.maximum(length, 1)
    return weighted_sums({"loss": means}, mask * length)
