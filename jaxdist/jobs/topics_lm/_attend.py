"""Ways to compute causal attention: with all scores at once, in chunks, or by a kernel of TPUs."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import flash_attention as kernels
from jax.sharding import PartitionSpec

from jaxdist import _replica
from jaxdist._mesh import ReplicaMesh

# The kernel works on blocks of positions. Its longest block here is that of MaxText.
FLASH_MULTIPLE = 128
_LONGEST_BLOCK = 512


def attend(
    query: jax.Array, key: jax.Array, value: jax.Array, *, how: str, chunk: int
) -> jax.Array:
    """Attend from each position to itself and those before it.

    Shapes:
        In: `[b, s, heads, head dim]` each. Out: the same.

    Args:
        query: The queries.
        key: The keys.
        value: The values.
        how: `"plain"` has all scores in memory, s x s for each head and row. `"chunked"` has those
            of `chunk` queries at a time, and computes them again in the backward pass. `"flash"`
            is a kernel on TPUs, where s is a multiple of 128; elsewhere it is `"chunked"`.
        chunk: The number of queries.

    Example:
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 6, 2, 4))
        >>> plain, chunked = (attend(q, k, v, how=w, chunk=4) for w in ("plain", "chunked"))
        >>> bool(jnp.allclose(plain, chunked, atol=1e-6))
        True
    """
    if how == "plain":
        return jax.nn.dot_product_attention(query, key, value, is_causal=True)
    frame = _replica.current_frame()
    layout = frame.strategy.layout if frame is not None and frame.is_inside_step else None
    platform = jax.default_backend() if layout is None else layout.platform
    if how == "flash" and platform == "tpu" and query.shape[1] % FLASH_MULTIPLE == 0:
        return _attend_by_kernel(query, key, value, layout)
    return _attend_in_chunks(query, key, value, chunk)


def _attend_in_chunks(query: jax.Array, key: jax.Array, value: jax.Array, chunk: int) -> jax.Array:
    rows, length, heads, dims = query.shape
    chunk = min(chunk, length)
    count = math.ceil(length / chunk)
    # Positions after the last one attend to everything, and are cut off at the end.
    padded = jnp.pad(query, ((0, 0), (0, count * chunk - length), (0, 0), (0, 0)))
    parts = padded.reshape(rows, count, chunk, heads, dims).swapaxes(0, 1)

    # Without it, the backward pass would keep the scores of all chunks.
    @jax.checkpoint
    def attend_part(number: jax.Array, part: jax.Array) -> jax.Array:
        places = number * chunk + jnp.arange(chunk)
        is_seen = places[:, None] >= jnp.arange(length)[None]
        return jax.nn.dot_product_attention(part, key, value, mask=is_seen[None, None])

    seen = jax.lax.map(lambda given: attend_part(*given), (jnp.arange(count), parts))
    return seen.swapaxes(0, 1).reshape(padded.shape)[:, :length]


def _attend_by_kernel(
    query: jax.Array, key: jax.Array, value: jax.Array, layout: ReplicaMesh | None
) -> jax.Array:
    run = functools.partial(_run_kernel, scale=1 / math.sqrt(query.shape[-1]))
    if layout is not None and layout.num_logical > 1:
        # XLA cannot split a kernel over devices, so the heads are split here.
        by_head = PartitionSpec(None, None, layout.logical_axes)
        run = jax.shard_map(
            run,
            in_specs=(by_head,) * 3,
            out_specs=by_head,
            axis_names=set(layout.logical_axes),
            check_vma=False,
        )
    return run(query, key, value)


def _run_kernel(query: jax.Array, key: jax.Array, value: jax.Array, *, scale: float) -> jax.Array:
    size = math.gcd(query.shape[1], _LONGEST_BLOCK)
    names = (
        "block_q block_k_major block_k block_q_major_dkv block_k_major_dkv block_k_dkv "
        "block_q_dkv block_k_major_dq block_k_dq block_q_dq"
    )
    sizes: dict[str, Any] = dict.fromkeys(names.split(), size)
    blocks = kernels.BlockSizes(block_b=1, **sizes)
    query, key, value = (x.swapaxes(1, 2) for x in (query, key, value))  # [b, heads, s, dims]
    seen: jax.Array = kernels.flash_attention(
        query, key, value, causal=True, sm_scale=scale, block_sizes=blocks
    )
    return seen.swapaxes(1, 2)
