"""Computes causal attention: with all scores at once, in chunks, or by a TPU kernel."""

import functools
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import flash_attention as flash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import PartitionSpec

import jaxdist

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
    logical = [name for name in sizes if strategy and name not in strategy.replica_axes]
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
