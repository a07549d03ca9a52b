"""Causal attention with rotary positions: plain, in chunks, by kernels, divided, or by byte."""

import functools
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental.pallas.ops.tpu import flash_attention as flash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import PartitionSpec

import jaxdist
from jaxdist import nn, partition
from jaxdist.jobs.topics_lm._layout import NOT_DIVIDED, Layout
from jaxdist.jobs.topics_lm._schema import ModelConfig

# The kernels work on blocks of positions. Their longest block here is that of MaxText.
BLOCK_MULTIPLE = 128
_LONGEST_BLOCK = 512


def attend(
    query: jax.Array, key: jax.Array, value: jax.Array, *, how: str, chunk: int
) -> jax.Array:
    """Attend from each position to itself and the positions before it.

    Shapes:
        In: `[b, s, heads, head dim]` each. Out: the same.

    Args:
        query: The queries.
        key: The keys.
        value: The values.
        how: `"plain"` has all scores in memory, s x s for each head and row. `"chunked"` has those
            of `chunk` queries at a time, and recomputes them in the backward pass. `"flash"`
            and `"splash"` are kernels for TPUs, where s must be a multiple of 128; elsewhere they
            mean `"chunked"`. Splash skips the blocks after a position, and keeps less for the
            backward pass.
        chunk: The number of queries.

    Example:
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 6, 2, 4))
        >>> plain, chunked = (attend(q, k, v, how=w, chunk=4) for w in ("plain", "chunked"))
        >>> bool(jnp.allclose(plain, chunked, atol=1e-6))
        True
    """
    if how == "plain":
        return jax.nn.dot_product_attention(query, key, value, is_causal=True)
    is_in_step = jaxdist.has_strategy() and not jaxdist.in_cross_replica_context()
    strategy = jaxdist.get_strategy() if is_in_step else None
    platform = strategy.mesh.devices.flat[0].platform if strategy else jax.default_backend()
    if how in KERNELS and platform == "tpu" and query.shape[1] % BLOCK_MULTIPLE == 0:
        return _attend_by_kernel(query, key, value, strategy, KERNELS[how])
    return _attend_in_chunks(query, key, value, chunk)


def _attend_in_chunks(query: jax.Array, key: jax.Array, value: jax.Array, chunk: int) -> jax.Array:
    rows, length, heads, dims = query.shape
    chunk = min(chunk, length)
    count = math.ceil(length / chunk)
    # Padded positions after the last one attend to everything, and are cut off at the end.
    padded = jnp.pad(query, ((0, 0), (0, count * chunk - length), (0, 0), (0, 0)))
    parts = padded.reshape(rows, count, chunk, heads, dims).swapaxes(0, 1)

    # Without checkpoint, the backward pass would keep the scores of all chunks.
    @jax.checkpoint
    def attend_part(number: jax.Array, part: jax.Array) -> jax.Array:
        places = number * chunk + jnp.arange(chunk)
        is_seen = places[:, None] >= jnp.arange(length)[None]
        return jax.nn.dot_product_attention(part, key, value, mask=is_seen[None, None])

    seen = jax.lax.map(lambda given: attend_part(*given), (jnp.arange(count), parts))
    return seen.swapaxes(0, 1).reshape(padded.shape)[:, :length]


def _attend_by_kernel(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    strategy: jaxdist.Strategy | None,
    kernel: Callable[..., jax.Array],
) -> jax.Array:
    run: Callable[..., jax.Array] = functools.partial(kernel, scale=1 / math.sqrt(query.shape[-1]))
    sizes = dict(strategy.mesh.shape) if strategy else {}
    # In a stage of a pipeline, the axis of the stages is divided already.
    manual = jax.sharding.get_abstract_mesh().manual_axes
    own = strategy.replica_axes if strategy else ()
    logical = [name for name in sizes if name not in own and name not in manual]
    if math.prod(sizes[name] for name in logical) > 1:
        # XLA cannot split a kernel over devices, so the heads are split here.
        by_head = PartitionSpec(None, None, tuple(logical))
        run = jax.shard_map(
            run,
            in_specs=(by_head,) * 3,
            out_specs=by_head,
            axis_names=set(logical),
            check_vma=False,
        )
    return run(query, key, value)


def _run_flash(query: jax.Array, key: jax.Array, value: jax.Array, *, scale: float) -> jax.Array:
    size = math.gcd(query.shape[1], _LONGEST_BLOCK)
    names = (
        "block_q block_k_major block_k block_q_major_dkv block_k_major_dkv block_k_dkv "
        "block_q_dkv block_k_major_dq block_k_dq block_q_dq"
    )
    sizes: dict[str, Any] = dict.fromkeys(names.split(), size)
    blocks = flash.BlockSizes(block_b=1, **sizes)
    query, key, value = (x.swapaxes(1, 2) for x in (query, key, value))  # [b, heads, s, dims]
    seen: jax.Array = flash.flash_attention(
        query, key, value, causal=True, sm_scale=scale, block_sizes=blocks
    )
    return seen.swapaxes(1, 2)


def _run_splash(query: jax.Array, key: jax.Array, value: jax.Array, *, scale: float) -> jax.Array:
    length, heads = query.shape[1:3]
    size = math.gcd(length, _LONGEST_BLOCK)
    names = (
        "block_q block_kv block_kv_compute block_q_dkv block_kv_dkv block_kv_dkv_compute "
        "block_q_dq block_kv_dq"
    )
    sizes: dict[str, Any] = dict.fromkeys(names.split(), size)
    mask = masks.MultiHeadMask([masks.CausalMask((length, length))] * heads)
    # The mask is known while tracing, and decides which blocks the kernel visits.
    blocks = splash.BlockSizes(**sizes)
    kernel: Any = splash.make_splash_mha_single_device(mask, block_sizes=blocks)
    query, key, value = (x.swapaxes(1, 2) for x in (query * scale, key, value))
    seen: jax.Array = jax.vmap(kernel)(query, key, value)
    return seen.swapaxes(1, 2)


KERNELS: Mapping[str, Callable[..., jax.Array]] = MappingProxyType(
    {"flash": _run_flash, "splash": _run_splash}
)


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
        self,
        config: ModelConfig,
        *,
        out_init: Any,
        linear: dict[str, Any],
        rngs: nnx.Rngs,
        layout: Layout = NOT_DIVIDED,
    ) -> None:
        self.layout = layout
        width, self.heads, self.head_dim = config.width, config.heads, config.dims_of_a_head
        inner = self.heads * self.head_dim
        self.how, self.chunk = config.attention, config.attention_chunk
        self.splits = config.split_residual
        self.query = nnx.Linear(width, inner, rngs=rngs, **linear)
        self.key = nnx.Linear(width, inner, rngs=rngs, **linear)
        self.value = nnx.Linear(width, inner, rngs=rngs, **linear)
        self.out = nnx.Linear(inner, width, rngs=rngs, **{**linear, "kernel_init": out_init})

    def __call__(self, x: jax.Array) -> jax.Array:
        """Attend from each position to itself and those before it: `[b, s, d]` in and out."""
        query, key, value = self._project(x, self.layout.number(x.shape[1]))
        if self.splits:
            # From here heads are split, and positions are whole. XLA would gather the keys of each
            # chunk again.
            query, key, value = partition.constrain((query, key, value), partition.Split(2))
        if self.layout.positions > 1:
            kind = self.layout.attention
            seen = nn.attention(query, key, value, kind=kind, causal=True, block=self.chunk)
        else:
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
