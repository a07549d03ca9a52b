"""Attention of all positions by JAX's kernel for TPUs, where one device has them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist import _replica
from jaxdist.nn._attention import kernel
from jaxdist.nn._attention.kernel import Plan

# The kernel works on tiles of so many positions, and of so many dims of a head.
_POSITIONS, _DIMS = 128, 64
_DTYPES = ("bfloat16", "float32")


def can_attend(plan: Plan, q: jax.Array) -> bool:
    """Return whether the kernel computes this attention here.

    XLA cannot divide a kernel. So each axis of the mesh is manual, or has one device.
    """
    frame = _replica.current_frame()
    if frame is None or not frame.is_inside_step or frame.strategy.layout.platform != "tpu":
        return False
    around = jax.sharding.get_abstract_mesh()
    is_whole = all(n == 1 or a in around.manual_axes for a, n in around.shape.items())
    fits = not q.shape[1] % _POSITIONS and not q.shape[3] % _DIMS and str(q.dtype) in _DTYPES
    # The kernel multiplies with the default precision.
    return is_whole and fits and plan.precision is None


def attend(
    plan: Plan,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array | None,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Return the attention of all positions, in their order.

    The kernel has no second derivative. That is computed blockwise, as elsewhere.

    Args:
        plan: The mask, the scale and the size of blocks.
        q: Queries `[b, t, heads, d]`.
        k: Keys `[b, t, kv_heads, d]`.
        v: Values `[b, t, kv_heads, d]`.
        segments: The segments `[b, t]`, or None.
        interpret: Whether to run the kernel without a TPU.
    """
    rows = kernel.Rows(jnp.arange(q.shape[1], dtype=jnp.int32), segments)

    def run(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return _run(plan, q, k, v, segments, interpret=interpret)

    def run_blockwise(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return kernel.attend(plan, q, rows, k, v, rows)

    def differentiate(arrays: Any, gradient: jax.Array) -> Any:
        return jax.vjp(run_blockwise, *arrays)[1](gradient)

    # The two passes of the kernel, whose own derivatives are those of blockwise attention. What
    # the first keeps for the second depends on the arrays, so its tangents would say nothing more.
    @jax.custom_jvp
    def push(arrays: Any) -> Any:
        return jax.vjp(run, *arrays)

    @push.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        out, kept = push(*primals)
        moved = jax.jvp(run_blockwise, *primals, *tangents)[1]
        return (out, kept), (moved, jax.tree.map(_make_no_tangent, kept))

    @jax.custom_jvp
    def pull(arrays: Any, kept: Any, gradient: jax.Array) -> Any:
        return kept(gradient)

    @pull.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        (arrays, _, gradient), (of_arrays, _, of_gradient) = primals, tangents
        given, moved = (arrays, gradient), (of_arrays, of_gradient)
        return pull(*primals), jax.jvp(differentiate, given, moved)[1]

    @jax.custom_vjp
    def call(*arrays: jax.Array) -> jax.Array:
        return run(*arrays)

    def forward(*arrays: jax.Array) -> Any:
        out, kept = push(arrays)
        return out, (arrays, kept)

    call.defvjp(forward, lambda kept, gradient: pull(*kept, gradient))
    return call(q, k, v)


def _make_no_tangent(x: Any) -> Any:
    is_float = jnp.issubdtype(x.dtype, jnp.inexact)
    return jnp.zeros_like(x) if is_float else np.zeros(x.shape, jax.dtypes.float0)


def _run(
    plan: Plan, q: jax.Array, k: jax.Array, v: jax.Array, segments: Any, *, interpret: bool
) -> jax.Array:
    # Imported here: Pallas takes long to import.
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel as splash,
    )
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_mask as masks,
    )

    rows, length, heads, d = q.shape
    kv_heads = k.shape[2]
    group = heads // kv_heads
    make_mask: Any = masks.CausalMask if plan.causal else masks.FullMask
    # The mask is known while tracing, and decides which blocks the kernel visits.
    mask = masks.MultiHeadMask([make_mask((length, length))] * group)
    tiles, most = length // _POSITIONS, max(1, plan.block // _POSITIONS)
    size = _POSITIONS * max(n for n in range(1, most + 1) if tiles % n == 0)
    names = (
        "block_q block_kv block_kv_compute block_q_dkv block_kv_dkv block_kv_dkv_compute "
        "block_q_dq block_kv_dq"
    )
    sizes: dict[str, Any] = dict.fromkeys(names.split(), size)
    attend_heads: Any = splash.make_splash_mqa_single_device(
        mask, block_sizes=splash.BlockSizes(**sizes), interpret=interpret
    )

    def of_row(q: Any, k: Any, v: Any, segments: Any) -> jax.Array:
        ids = None if segments is None else splash.SegmentIds(q=segments, kv=segments)
        found: jax.Array = jax.vmap(lambda *x: attend_heads(*x, segment_ids=ids))(q, k, v)
        return found

    scaled = (q.astype(jnp.float32) * plan.scale).astype(q.dtype)
    by_head = scaled.swapaxes(1, 2).reshape(rows, kv_heads, group, length, d)
    ids = None if segments is None else segments.astype(jnp.int32)
    out = jax.vmap(of_row)(by_head, k.swapaxes(1, 2), v.swapaxes(1, 2), ids)
    return out.reshape(rows, heads, length, d).swapaxes(1, 2)
