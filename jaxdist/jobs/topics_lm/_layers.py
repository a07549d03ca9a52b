"""A layer of the transformer: attention, and an MLP or a mixture of experts; layers as a stack."""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxdist import nn, partition
from jaxdist.jobs.topics_lm._attention import Attention, Cache
from jaxdist.jobs.topics_lm._layout import NOT_DIVIDED, Layout
from jaxdist.jobs.topics_lm._schema import ModelConfig

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


SPREAD = 0.02  # standard deviation of initial parameters


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


class Experts(nnx.Module):
    """A mixture of MLPs, of which a router chooses some for each position."""

    def __init__(
        self, config: ModelConfig, *, out_init: Any, linear: dict[str, Any], rngs: nnx.Rngs
    ) -> None:
        count, width, hidden = config.experts, config.width, config.hidden
        init, self.dtype = linear["kernel_init"], linear["dtype"]

        def draw(init: Any, *shape: int) -> "nnx.Param[jax.Array]":
            return nnx.Param(init(rngs.params(), shape, jnp.float32))

        self.router = draw(init, width, count)
        self.up = draw(init, count, width, hidden)
        self.down = draw(out_init, count, hidden, width)
        self.is_gated = config.mlp == "gated"
        if self.is_gated:
            self.gate = draw(init, count, width, hidden)
        self.top_k, self.capacity = config.top_k, config.capacity or None

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Apply the layer: `[b, s, d]` in and out.

        A row is a group of `nn.experts`. The second result is `[2]`: the balance loss, and the
        share of the choices that are dropped.
        """
        names = ("up", "down", "gate") if self.is_gated else ("up", "down")
        weights = {name: getattr(self, name)[...] for name in names}
        x = x.astype(self.dtype)
        y, found = nn.experts(
            self._compute_one,
            self.router[...],
            weights,
            x,
            top_k=self.top_k,
            capacity=self.capacity,
        )
        return y, jnp.stack(found)

    def _compute_one(self, w: dict[str, jax.Array], rows: jax.Array) -> jax.Array:
        w = {name: x.astype(rows.dtype) for name, x in w.items()}
        up = rows @ w["up"]
        return (nnx.silu(rows @ w["gate"]) * up if self.is_gated else nnx.gelu(up)) @ w["down"]


class Layer(nnx.Module):
    """Attention and an MLP, each after a norm, and each added to its input."""

    def __init__(
        self, config: ModelConfig, *, rngs: nnx.Rngs, layout: Layout = NOT_DIVIDED
    ) -> None:
        dtype = jnp.dtype(config.dtype)
        normal = nnx.initializers.normal(SPREAD)
        # Every layer adds to the residual stream, so more layers need smaller initial outputs.
        out_init = nnx.initializers.normal(SPREAD / math.sqrt(2 * config.layers))
        linear = {"use_bias": False, "kernel_init": normal, "dtype": dtype}
        self.attention_norm = nnx.RMSNorm(config.width, dtype=dtype, rngs=rngs)
        self.attention = Attention(
            config, out_init=out_init, linear=linear, rngs=rngs, layout=layout
        )
        self.mlp_norm = nnx.RMSNorm(config.width, dtype=dtype, rngs=rngs)
        kind: type[Mlp] | type[Experts] = Experts if config.experts else Mlp
        self.mlp = kind(config, out_init=out_init, linear=linear, rngs=rngs)
        self.dropout, self.splits, self.layout = config.dropout, config.split_residual, layout

    def __call__(self, x: jax.Array, keys: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
        """Apply the layer: `[b, s, d]` in and out. `keys` has a random key for each row.

        Without keys there is no dropout. The second result is that of `Experts`, or None.
        """
        x = self._split(x)
        x = self._split(x + self._drop_out(self.attention(self.attention_norm(x)), keys, 0))
        y, routing = self._apply_mlp(self.mlp_norm(x))
        return self._split(x + self._drop_out(y, keys, 1)), routing

    def step(self, x: jax.Array, cache: Cache, position: jax.Array) -> tuple[jax.Array, Cache]:
        """Apply the layer to one position `[b, d]`, with the cache of the positions before it."""
        seen, cache = self.attention.step(self.attention_norm(x), cache, position)
        x = x + seen
        # A row with one position: a token that is generated displaces no other one.
        y, _ = self._apply_mlp(self.mlp_norm(x)[:, None])
        return x + y[:, 0], cache

    def _apply_mlp(self, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        return self.mlp(x) if isinstance(self.mlp, Experts) else (self.mlp(x), None)

    def _split(self, x: jax.Array) -> jax.Array:
        """Split the positions over the logical devices of a replica, if configured."""
        if not self.splits:
            return self.layout.divide_rows(x)
        return partition.constrain(x, partition.Split(1))

    def _drop_out(self, x: jax.Array, keys: jax.Array | None, place: int) -> jax.Array:
        if keys is None or not self.dropout:
            return x
        kept = 1.0 - self.dropout

        # One key for each row, so that the mask of a row does not depend on the number of replicas.
        def mask(key: jax.Array) -> jax.Array:
            return jax.random.bernoulli(jax.random.fold_in(key, place), kept, x.shape[1:])

        # The mask of a position is that of one device, wherever the position lies.
        masks = self.layout.split(jax.vmap(mask)(keys))
        return jnp.where(masks, x / kept, 0).astype(x.dtype)
