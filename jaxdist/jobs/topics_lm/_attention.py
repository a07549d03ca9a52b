"""Causal attention with rotary positions, over a whole sequence or one byte at a time."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxdist.jobs.topics_lm._attend import attend
from jaxdist.jobs.topics_lm._schema import ModelConfig

Cache = dict[str, jax.Array]  # key and value, each [row, slot, head, head dim]

_LONGEST_WAVE = 10_000.0  # wavelength of the slowest rotation, in positions / (2 pi)


def rotate(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotate the dims of each head by the position (RoPE).

    The product of a query and a key then depends only on the distance of their positions.

    Shapes:
        In: `[b, s, heads, head dim]`, and positions `[s]`. Out: `[b, s, heads, head dim]`.

    Example:
        >>> x = jax.random.normal(jax.random.key(0), (1, 2, 1, 8))
        >>> def product(first):
        ...     q, k = rotate(x, first + jnp.arange(2))[0, :, 0]
        ...     return q @ k
        >>> bool(jnp.allclose(product(0), product(70), atol=1e-4))
        True
    """
    half = x.shape[-1] // 2
    speeds = _LONGEST_WAVE ** (-jnp.arange(half) / half)
    angles = positions[:, None, None] * speeds[None, None]  # [s, 1, half]
    cos, sin = jnp.cos(angles)[None], jnp.sin(angles)[None]
    cos, sin = jnp.concatenate([cos, cos], axis=-1), jnp.concatenate([-sin, sin], axis=-1)
    # Swap the halves before the conversion to float32. After it, a TPU would write the float32
    # copy to memory.
    other = jnp.roll(x, half, axis=-1).astype(jnp.float32)
    # In float32: bfloat16 has too few bits for the angles of far positions.
    return (x.astype(jnp.float32) * cos + other * sin).astype(x.dtype)


class Attention(nnx.Module):
    """Causal self-attention. Every head has `config.dims_of_a_head` dims."""

    def __init__(
        self, config: ModelConfig, *, out_init: Any, linear: dict[str, Any], rngs: nnx.Rngs
    ) -> None:
        width, self.heads, self.head_dim = config.width, config.heads, config.dims_of_a_head
        inner = self.heads * self.head_dim
        self.how, self.chunk = config.attention, config.attention_chunk
        self.query = nnx.Linear(width, inner, rngs=rngs, **linear)
        self.key = nnx.Linear(width, inner, rngs=rngs, **linear)
        self.value = nnx.Linear(width, inner, rngs=rngs, **linear)
        self.out = nnx.Linear(inner, width, rngs=rngs, **{**linear, "kernel_init": out_init})

    def __call__(self, x: jax.Array) -> jax.Array:
        """Attend from each position to itself and those before it: `[b, s, d]` in and out."""
        positions = jnp.arange(x.shape[1])
        query, key, value = self._project(x, positions)
        seen = attend(query, key, value, how=self.how, chunk=self.chunk)
        out = self.out.kernel[...]
        by_head = jnp.asarray(out, seen.dtype).reshape(self.heads, self.head_dim, out.shape[-1])
        return jnp.einsum("bshk,hkd->bsd", seen, by_head)

    def step(self, x: jax.Array, cache: Cache, position: jax.Array) -> tuple[jax.Array, Cache]:
        """Attend from one position `[b, d]` to the cache, and return the output and the new cache.

        The cache is a ring buffer: when it is full, the new position replaces the oldest one.
        """
        query, key, value = self._project(x[:, None], position[None])
        slots = cache["key"].shape[1]
        slot = position % slots
        # First the update, then the attention: a position attends to itself.
        cache = {
            name: jax.lax.dynamic_update_slice_in_dim(cache[name], new, slot, axis=1)
            for name, new in {"key": key, "value": value}.items()
        }
        is_filled = (jnp.arange(slots) <= position)[None, None, None]  # [b, head, query, slot]
        seen = jax.nn.dot_product_attention(query, cache["key"], cache["value"], mask=is_filled)
        return self.out(seen.reshape(x.shape[0], seen.shape[2] * seen.shape[3])), cache

    def empty_cache(self, rows: int, slots: int) -> Cache:
        """Return an empty cache for `slots` positions."""
        shape = (rows, slots, self.heads, self.head_dim)
        dtype = self.query.dtype or jnp.float32
        return {name: jnp.zeros(shape, dtype) for name in ("key", "value")}

    def _project(
        self, x: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        # A product with the kernel of each head has the layout that attention needs. The result of
        # a product with the whole kernel would have to be copied into that layout.
        def project(linear: nnx.Linear) -> jax.Array:
            kernel = jnp.asarray(linear.kernel[...], dtype)
            by_head = kernel.reshape(x.shape[-1], self.heads, self.head_dim)
            return jnp.einsum("bsd,dhk->bshk", x.astype(dtype), by_head)

        dtype = self.query.dtype or x.dtype
        query, key, value = map(project, (self.query, self.key, self.value))
        return rotate(query, positions), rotate(key, positions), value
