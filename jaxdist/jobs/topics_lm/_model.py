"""A decoder-only transformer over bytes, and its steps."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxdist import Sharded, partition
from jaxdist.jobs.topics_lm._attention import Cache
from jaxdist.jobs.topics_lm._layers import SPREAD, Layer, stack, take
from jaxdist.jobs.topics_lm._layout import NOT_DIVIDED, Layout, Pipeline
from jaxdist.jobs.topics_lm._schema import ModelConfig
from jaxdist.nn import embedding_lookup, example_keys, pipeline_loss, vocabulary_head
from jaxdist.training import reduce_and_update, weighted_sums


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
        self,
        config: ModelConfig,
        *,
        rngs: nnx.Rngs,
        pipeline: Pipeline | None = None,
        layout: Layout = NOT_DIVIDED,
    ) -> None:
        dtype = jnp.dtype(config.dtype)
        normal = nnx.initializers.normal(SPREAD)
        self.embed = nnx.Embed(
            config.vocabulary, config.width, embedding_init=normal, dtype=dtype, rngs=rngs
        )
        self.layers: Any = (
            stack(lambda own: Layer(config, rngs=own, layout=layout), config.layers, rngs)
            if config.scan_layers
            else nnx.List(Layer(config, rngs=rngs, layout=layout) for _ in range(config.layers))
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
        self.config, self.pipeline, self.layout = config, pipeline, layout

    def __call__(self, tokens: jax.Array, keys: jax.Array | None = None) -> jax.Array:
        """Return float32 logits `[b, s, v]` of the byte after each of `tokens` `[b, s]`.

        Args:
            tokens: Integers from 0 to 255.
            keys: A random key for each row `[b]`, for dropout; None for no dropout.
        """
        return self.route(tokens, keys)[0]

    def route(
        self, tokens: jax.Array, keys: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array | None]:
        """Return the logits, and how the layers choose experts; None for a model without experts.

        The second result is `[layers, 2]`: the balance loss of each layer, and the share of its
        choices that are dropped.
        """
        x = self._embed(tokens)
        if self.config.scan_layers:
            x, routing = self._scan_layers(x, keys)
            return self._unembed(x), routing
        run = _RUNS[self.config.remat]
        found: list[jax.Array] = []
        for number, layer in enumerate(self.layers):
            own = None if keys is None else _fold_keys(keys, number)
            x, one = run(layer, x, own)
            found.append(one)
        return self._unembed(x), jnp.stack(found) if self.config.experts else None

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
        self,
        tokens: jax.Array,
        weights: jax.Array,
        key: jax.Array | None,
        micro_batches: int,
        of_routing: jax.Array | None = None,
    ) -> jax.Array:
        """Return the sum of the weighted losses of all bytes but the first, by micro-batches.

        Args:
            tokens: `[b, s + 1]`.
            weights: A weight of each byte that is predicted, `[b, s]`.
            key: The key of the step for dropout, or None.
            micro_batches: The number of micro-batches.
            of_routing: `[layers, 2]`, factors of the results of `Experts` in each layer, which are
                added to the loss.
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

        def layer(given: Any, x: jax.Array, keys: jax.Array | None = None) -> Any:
            w, factors = given
            x, routing = nnx.merge(of_layer, w)(x, keys)
            return x if factors is None else (x, jnp.vdot(routing, factors))

        if config.remat != "none":
            # The engine differentiates a layer by itself, so XLA has nothing to merge it with.
            layer = jax.checkpoint(layer, policy=_POLICIES[config.remat], prevent_cse=False)

        head = vocabulary_head(
            lambda rows: rows["targets"],
            weights=lambda rows: rows["weights"],
            norm=lambda norm, x: nnx.merge(of_norm, norm)(x),
        )
        if of_routing is not None and pipeline.chunks > 1:
            of_routing = of_routing.reshape(pipeline.chunks, -1, 2)
        layers = self._cast_pieces(jax.tree.map(self._as_sums, layers)), of_routing
        rows = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}
        # Stages that cannot share the words equally compute the whole head, as any function.
        is_split = config.vocabulary % pipeline.stages == 0
        return pipeline_loss(
            embed,
            layer,
            head if is_split else lambda h, x, rows: head(h, x, rows),
            (table, layers, (norm, matrix)),
            self.layout.split(rows),
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

    def _scan_layers(self, x: jax.Array, keys: jax.Array | None) -> tuple[jax.Array, Any]:
        """Apply all layers in one loop, whose body is compiled once."""
        graphdef, state = nnx.split(self._join_chunks() if self.pipeline else self.layers)

        def body(x: jax.Array, given: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
            number, row = given
            own = None if keys is None else _fold_keys(keys, number)
            return nnx.merge(graphdef, self._gather(row))(x, own)

        policy = _POLICIES[self.config.remat]
        if self.config.remat != "none":
            # A loop is never merged with another one, so nothing has to prevent that.
            body = jax.checkpoint(body, policy=policy, prevent_cse=False)
        rows = jnp.arange(self.config.layers), jax.tree.map(self._as_sums, state)
        return jax.lax.scan(body, x, rows)

    def _gather(self, parameters: Any) -> Any:
        """Gather parameters; cast matrices to the dtype of the products first, to send less."""

        def gather(path: Any, x: Any) -> Any:
            return partition.gather(x, dtype=self.config.dtype if _is_cast(path, x.ndim) else None)

        whole: Any = jax.tree_util.tree_map_with_path(gather, parameters, is_leaf=_is_in_pieces)
        return whole

    def _cast_pieces(self, stacks: Any) -> Any:
        """Cast matrices in pieces to the dtype of the products, in which a pipeline gathers them.

        The dims of a layer are after that of the layers, and after that of the chunks.
        """
        before = 2 if self.pipeline is not None and self.pipeline.chunks > 1 else 1

        def cast(path: Any, x: Any) -> Any:
            if not isinstance(x, Sharded) or not _is_cast(path, x.ndim - before):
                return x
            # The node as an array would be gathered first.
            return jax.tree.map(lambda piece: piece.astype(self.config.dtype), x)

        return jax.tree_util.tree_map_with_path(cast, stacks, is_leaf=_is_in_pieces)

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


def _is_in_pieces(x: Any) -> bool:
    return isinstance(x, Sharded)


def _is_cast(path: Any, dims: int) -> bool:
    """Whether a parameter of a layer is used in the dtype of the products."""
    # Experts are chosen in float32, in every layout.
    return dims > 1 and "router" not in jax.tree_util.keystr(path)


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
    """Return the cross-entropy in nats of all bytes but the first: `[b, s]` of `[b, s + 1]`.

    Where devices divide the positions, these are in the order of the layout.
    """
    return _find_losses(model, tokens, keys)[0]


def _find_losses(
    model: Transformer, tokens: jax.Array, keys: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """Return the losses of bytes, and the second result of `Transformer.route`."""
    tokens = tokens.astype(jnp.int32)
    # Shifted before the split: in another order the next row is not the next byte.
    inputs, targets = model.layout.split((tokens[:, :-1], tokens[:, 1:]))
    logits, routing = model.route(inputs, keys)
    # A sum over one-hot rows instead of a gather: the logits may be sharded over the vocabulary,
    # and XLA would all-gather them for a gather.
    is_target = jnp.arange(logits.shape[-1])[None, None] == targets[:, :, None]
    chosen = jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
    return jax.nn.logsumexp(logits, axis=-1) - chosen, routing


Sums = dict[str, jax.Array]


def train_step(
    model: Transformer, optimizer: "nnx.Optimizer[Any]", batch: Batch
) -> jax.Array | Sums:
    """Update the model in place, and return the mean loss over the global batch's bytes `[]`.

    With experts it is a dict of this loss, of the mean balance loss of the layers, and of the share
    of choices that are dropped, as `loss`, `balance` and `dropped`.
    """
    tokens = batch["tokens"]
    keys = key = None
    if model.config.dropout:
        # The key depends only on the step: a resumed run has the dropout of an uninterrupted one.
        key = jax.random.fold_in(jax.random.key(0, impl="threefry2x32"), optimizer.step.get_value())
        keys = None if model.pipeline else example_keys(key, tokens.shape[0])
    size = tokens[:, 1:].size
    sums, grads = (_differentiate_by_micro_batches if model.pipeline else _differentiate)(
        model, tokens, keys if model.pipeline is None else key
    )
    count, sums = reduce_and_update(model, optimizer, grads, size, sums)
    means = jax.tree.map(lambda x: x / count, sums)
    return means if model.config.experts else means["loss"]


def _differentiate(
    model: Transformer, tokens: jax.Array, keys: jax.Array | None
) -> tuple[Sums, Any]:
    """Return sums over the bytes of this replica, and the gradients of the one that is trained."""
    size = tokens[:, 1:].size

    def total_loss(model: Transformer) -> tuple[jax.Array, Sums]:
        losses, routing = _find_losses(model, tokens, keys)
        total = jnp.sum(losses)
        if routing is None:
            return total, {"loss": total}
        balance, dropped = routing[:, 0], routing[:, 1]
        means = {"balance": balance.mean() * size, "dropped": dropped.mean() * size}
        # A mean over the rows of this replica, so it weighs as much as they do.
        return total + model.config.balance * size * balance.sum(), {"loss": total, **means}

    (_, sums), grads = nnx.value_and_grad(total_loss, has_aux=True)(model)
    return sums, grads


def _differentiate_by_micro_batches(
    model: Transformer, tokens: jax.Array, key: jax.Array | None
) -> tuple[Sums, Any]:
    """Return the same by the pipeline, which gives a loss and no other results.

    So the balance and the drops of the layers are derivatives, by a number that is zero and that
    they are multiplied by.
    """
    pipeline, config = model.pipeline or Pipeline(), model.config
    rows, whole = tokens.shape[0], jnp.ones(tokens[:, 1:].shape, jnp.float32)
    count, size = pipeline.choose_micro_batches(rows), whole.size
    tokens = tokens.astype(jnp.int32)
    if not config.experts:
        total, grads = nnx.value_and_grad(
            lambda model: model.weighted_loss(tokens, whole, key, count)
        )(model)
        return {"loss": total}, grads
    trained = config.balance * size

    def total_loss(model: Transformer, zeros: jax.Array) -> jax.Array:
        factors = zeros + jnp.array([[trained, 0.0]], zeros.dtype)
        return model.weighted_loss(tokens, whole, key, count, factors)

    zeros = jnp.zeros((config.layers, 2), jnp.float32)
    total, (grads, routing) = nnx.value_and_grad(total_loss, argnums=(0, 1))(model, zeros)
    balance, dropped = routing[:, 0], routing[:, 1]
    return {
        "loss": total - trained * balance.sum(),
        "balance": balance.mean() * size,
        "dropped": dropped.mean() * size,
    }, grads


def evaluation_step(model: Transformer, batch: Batch, mask: jax.Array) -> Batch:
    """Return the sums over the real bytes of all replicas."""
    tokens, length = batch["tokens"], batch["length"]
    if model.pipeline is not None:
        is_real = jnp.arange(tokens.shape[1] - 1)[None] < length[:, None]
        weight = (mask * length).astype(jnp.float32)
        real = (is_real * mask[:, None]).astype(jnp.float32)
        count = model.pipeline.choose_micro_batches(tokens.shape[0], must_be_asked=False)
        total = model.weighted_loss(tokens.astype(jnp.int32), real, None, count)
        mean = total / jnp.maximum(jnp.sum(weight), 1)
        return weighted_sums({"loss": jnp.broadcast_to(mean, weight.shape)}, weight)
    losses = byte_losses(model, tokens)
    is_real = model.layout.number(tokens.shape[1] - 1)[None] < length[:, None]
    # Take the mean of each window, weighted by its length: the last window may be padded.
    means = jnp.sum(jnp.where(is_real, losses, 0.0), axis=1) / jnp.maximum(length, 1)
    return weighted_sums({"loss": means}, mask * length)
