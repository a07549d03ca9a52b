"""Blockwise attention on one device, with its own derivative.

The rows of queries are taken in blocks, and the keys in blocks, so that the scores of one pair of
blocks are in memory at a time. Of the forward pass the derivative keeps the result and the
logarithm of each row's sum; it computes the scores again. A pair of blocks in which everything is
masked is skipped.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxdist._values import wide_dtype

# Masked scores: lower than others, and finite, so that no difference of two of them is nan.
_LOW = -0.7 * float(jnp.finfo(jnp.float32).max)
# The number of a key that only fills a block. No position is as large.
_NO_KEY = 2**31 - 1
# The scores of one pair of blocks take at most as many bytes, where the rows are more than a block.
_MOST_BYTES = 1 << 25
# Blocks are not made shorter than this to lie within a run of positions.
_LEAST = 128


@dataclasses.dataclass(frozen=True)
class Plan:
    """What does not depend on the values: the mask, the scale, and how the work is cut.

    Args:
        causal: Whether a row sees only keys of its own and earlier positions.
        scale: The factor of the scores.
        block: The number of keys in a block.
        run: The number of consecutive rows whose positions are consecutive. A block of at most so
            many rows has a narrow range of positions, so it can be skipped.
        precision: That of the products, as `jax.default_matmul_precision` is at the call.
    """

    causal: bool
    scale: float
    block: int
    run: int
    precision: Any = None

    def with_run(self, run: int) -> "Plan":
        """Return the plan for rows of which `run` follow each other."""
        return dataclasses.replace(self, run=run)


class Rows(NamedTuple):
    """The positions of rows `[t]`, and their segments `[b, t]` or None."""

    numbers: jax.Array
    segments: jax.Array | None


class Sums(NamedTuple):
    """What the keys so far have added to each row: the largest score, the sum, the weighted values.

    Each is in blocks of rows: `[blocks, b, kv_heads, group, rows]`, and a dim of values.
    """

    largest: jax.Array
    total: jax.Array
    values: jax.Array


class Blocks(NamedTuple):
    """All blocks of rows, or one: arrays `[b, heads, ..., rows, d]`, positions and segments."""

    arrays: tuple[jax.Array, ...]
    rows: Rows


def _product(plan: Plan, dims: str, x: jax.Array, y: jax.Array) -> jax.Array:
    to = wide_dtype(x.dtype)
    if x.dtype == jnp.float16:
        # A weight of one key of many is below the smallest number of float16.
        x, y = x.astype(to), y.astype(to)
    return jnp.einsum(dims, x, y, precision=plan.precision, preferred_element_type=to)


def _weighted(plan: Plan, dims: str, weights: jax.Array, y: jax.Array) -> jax.Array:
    """Return a product with weights, which are wide, in the dtype of `y`."""
    if y.dtype != jnp.float16:
        weights = weights.astype(y.dtype)
    return _product(plan, dims, weights, y.astype(weights.dtype))


def _split(array: jax.Array, size: int, dim: int, fill: Any) -> jax.Array:
    """Return the blocks of an array along `dim`, as its first dim; `fill` fills the last one."""
    rows = array.shape[dim]
    count = -(-rows // size)
    if count * size > rows:
        widths = [(0, 0)] * array.ndim
        widths[dim] = (0, count * size - rows)
        how = {"mode": "edge"} if fill is None else {"constant_values": fill}
        array = jnp.pad(array, widths, **how)
    shape = (*array.shape[:dim], count, size, *array.shape[dim + 1 :])
    return jnp.moveaxis(array.reshape(shape), dim, 0)


def _join(blocks: jax.Array, dim: int, rows: int) -> jax.Array:
    """Return the array whose blocks these are, without what fills the last one."""
    array = jnp.moveaxis(blocks, 0, dim)
    array = array.reshape(*array.shape[:dim], -1, *array.shape[dim + 2 :])
    return jax.lax.slice_in_dim(array, 0, rows, axis=dim)


def _cut(arrays: tuple[jax.Array, ...], rows: Rows, size: int, fill: int) -> Blocks:
    """Return all blocks of some arrays `[b, rows, heads, ..., d]`."""
    # Heads before rows, as products take them. XLA would choose this layout only within a loop, and
    # have copies of both layouts.
    blocks = tuple(jnp.moveaxis(_split(x, size, 1, 0), 2, -2) for x in arrays)
    return Blocks(blocks, _cut_rows(rows, size, fill))


def _cut_rows(rows: Rows, size: int, fill: int) -> Rows:
    """Return the positions and segments of all blocks of rows."""
    segments = None if rows.segments is None else _split(rows.segments, size, 1, None)
    return Rows(_split(rows.numbers, size, 0, fill), segments)


def _within_run(size: int, plan: Plan) -> int:
    """Return the size of a block that lies within a run of positions, or `size`."""
    return min(size, plan.run) if plan.run >= _LEAST else size


def keys_per_block(plan: Plan, keys: int) -> int:
    """Return the number of keys in a block, of some keys."""
    return _within_run(min(plan.block, keys), plan)


def rows_per_block(plan: Plan, q: jax.Array, keys: int) -> int:
    """Return the number of rows in a block: a multiple of the block of keys, as memory allows."""
    columns = keys_per_block(plan, keys)
    of_row = q.shape[0] * q.shape[2] * columns * wide_dtype(q.dtype).itemsize
    most = max(_MOST_BYTES // of_row, columns)
    return _within_run(min(most // columns * columns, q.shape[1]), plan)


def _groups(q: jax.Array, kv_heads: int) -> jax.Array:
    """Return queries `[b, t, kv_heads, group, d]`."""
    return q.reshape(*q.shape[:2], kv_heads, q.shape[2] // kv_heads, q.shape[3])


def _mask(plan: Plan, rows: Rows, keys: Rows, has_fill: bool) -> jax.Array | None:
    """Return which keys the rows of a block see, `[b or 1, 1, 1, rows, keys]`; None for all."""
    masks = []
    if plan.causal:
        masks.append((rows.numbers[:, None] >= keys.numbers[None])[None])
    elif has_fill:
        masks.append((keys.numbers < _NO_KEY)[None, None])
    if rows.segments is not None and keys.segments is not None:
        masks.append(rows.segments[:, :, None] == keys.segments[:, None])
    if not masks:
        return None
    return functools.reduce(jnp.logical_and, masks)[:, None, None]


def _is_seen(plan: Plan, rows: Rows, keys: Rows) -> jax.Array | None:
    """Return whether some row of a block may see some key; None where all do."""
    seen = []
    if plan.causal:
        seen.append(rows.numbers.max() >= keys.numbers.min())
    if rows.segments is not None and keys.segments is not None:
        ours, theirs = rows.segments, keys.segments
        before = ours.max(1) < theirs.min(1)
        after = ours.min(1) > theirs.max(1)
        seen.append(~jnp.all(before | after))
    return functools.reduce(jnp.logical_and, seen) if seen else None


def _where_seen(plan: Plan, rows: Rows, keys: Rows, is_only: bool, work: Any, kept: Any) -> Any:
    """Return `work(kept)`, or `kept` if no row of the block sees a key."""
    seen = None if is_only else _is_seen(plan, rows, keys)
    return work(kept) if seen is None else jax.lax.cond(seen, work, lambda kept: kept, kept)


def _exponents(scores: jax.Array, less: jax.Array, mask: jax.Array | None) -> jax.Array:
    """Return `exp(scores - less)`, and 0 for masked scores."""
    difference = scores - less[..., None]
    return jnp.exp(difference if mask is None else jnp.where(mask, difference, _LOW))


def no_sums(plan: Plan, q: jax.Array, k: jax.Array, v: jax.Array) -> Sums:
    """Return the sums of all rows before the first key."""
    size = rows_per_block(plan, q, k.shape[1])
    count = -(-q.shape[1] // size)
    heads = k.shape[2]
    shape = (count, q.shape[0], heads, q.shape[2] // heads, size)
    zeros = jnp.zeros(shape, wide_dtype(q.dtype))
    return Sums(zeros + _LOW, zeros, jnp.zeros((*shape, v.shape[3]), zeros.dtype))


def cut_keys(plan: Plan, k: jax.Array, v: jax.Array, keys: Rows) -> Blocks:
    """Return the blocks of keys and values `[b, s, kv_heads, d]`.

    The derivative keeps them, not what they were cut from.
    """
    return _cut((k, v), keys, keys_per_block(plan, k.shape[1]), _NO_KEY)


def cut_rows_of_keys(plan: Plan, keys: Rows) -> Rows:
    """Return the positions and segments of the blocks that `cut_keys` makes."""
    return _cut_rows(keys, keys_per_block(plan, len(keys.numbers)), _NO_KEY)


def join_keys(blocks: jax.Array, length: int) -> jax.Array:
    """Return the array `[b, s, kv_heads, d]` of which these are blocks."""
    return _join(jnp.moveaxis(blocks, -2, 2), 1, length)


def add_keys(
    plan: Plan, q: jax.Array, rows: Rows, of_keys: Blocks, length: int, sums: Sums
) -> Sums:
    """Return the sums after some keys, of which there are `length` without those that only fill."""
    of_rows = _cut((_groups(q, of_keys.arrays[0].shape[2]),), rows, sums.total.shape[-1], -1)
    has_fill = of_keys.rows.numbers.size > length
    is_only = len(of_rows.rows.numbers) == len(of_keys.rows.numbers) == 1

    def add_block(sums: Sums, block: Blocks, queries: Blocks) -> tuple[Sums, None]:
        (q,), (k, v) = queries.arrays, block.arrays

        def work(sums: Sums) -> Sums:
            mask = _mask(plan, queries.rows, block.rows, has_fill)
            scores = _product(plan, "bhgqd,bhkd->bhgqk", q, k) * plan.scale
            top = scores.max(-1) if mask is None else jnp.where(mask, scores, _LOW).max(-1)
            # The result does not depend on it, so it has no derivative.
            largest = jax.lax.stop_gradient(jnp.maximum(sums.largest, top))
            weights = _exponents(scores, largest, mask)
            before = jnp.exp(sums.largest - largest)
            values = _weighted(plan, "bhgqk,bhkd->bhgqd", weights, v)
            total = sums.total * before + weights.sum(-1)
            return Sums(largest, total, sums.values * before[..., None] + values)

        return _where_seen(plan, queries.rows, block.rows, is_only, work, sums), None

    def add_to_rows(_: None, given: tuple[Sums, Blocks]) -> tuple[None, Sums]:
        sums, queries = given
        return None, jax.lax.scan(functools.partial(add_block, queries=queries), sums, of_keys)[0]

    return jax.lax.scan(add_to_rows, None, (sums, of_rows))[1]


def finish(sums: Sums, rows: int, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Return the result `[b, rows, heads, d]`, and for each row the logarithm of its sum."""
    # Rows that fill a block may see nothing.
    total = jnp.where(sums.total == 0, 1, sums.total)
    values = (sums.values / total[..., None]).astype(dtype)
    out = _join(jnp.moveaxis(values, 4, 2), 1, rows)
    return out.reshape(*out.shape[:2], -1, out.shape[-1]), sums.largest + jnp.log(total)


class Cotangents(NamedTuple):
    """What the derivative needs of each row, with the gradient of the result.

    `lse` is the logarithm of the row's sum, and `delta` the product of the result and its gradient.
    """

    gradient: jax.Array  # [b, t, heads, d]
    lse: jax.Array  # in blocks
    delta: jax.Array  # in blocks


def cotangents(gradient: jax.Array, out: jax.Array, lse: jax.Array) -> Cotangents:
    """Return what the derivative needs of each row."""
    size, heads = lse.shape[-1], lse.shape[2]
    to = wide_dtype(out.dtype)
    delta = jnp.sum(gradient.astype(to) * out.astype(to), -1)
    blocks = _split(delta, size, 1, 0)
    blocks = blocks.reshape(*blocks.shape[:3], heads, -1)
    return Cotangents(gradient, lse, jnp.moveaxis(blocks, 2, 4))


def no_gradient(q: jax.Array, lse: jax.Array, kv_heads: int) -> jax.Array:
    """Return zeros for the gradient of the queries, in blocks."""
    count, size = lse.shape[0], lse.shape[-1]
    shape = (count, q.shape[0], kv_heads, q.shape[2] // kv_heads, size, q.shape[3])
    return jnp.zeros(shape, wide_dtype(q.dtype))


def join_gradient(blocks: jax.Array, q: jax.Array) -> jax.Array:
    """Return the gradient of the queries from its blocks."""
    rows = _join(jnp.moveaxis(blocks, -2, 2), 1, q.shape[1])
    return rows.reshape(q.shape).astype(q.dtype)


def add_gradients(
    plan: Plan,
    q: jax.Array,
    rows: Rows,
    given: Cotangents,
    of_keys: Blocks,
    length: int,
    dq: jax.Array,
    to: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the gradients of queries, after some keys, and of these keys and values.

    All are in blocks, those of keys and values in the dtype `to`.
    """
    heads = of_keys.arrays[0].shape[2]
    both = (_groups(q, heads), _groups(given.gradient, heads))
    of_rows = _cut(both, rows, given.lse.shape[-1], -1)
    has_fill = of_keys.rows.numbers.size > length
    count = len(of_rows.rows.numbers)
    is_only = count == len(of_keys.rows.numbers) == 1

    def of_block(dq: jax.Array, block: Blocks) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        k, v = block.arrays

        def of_pair(sums: Any, one: Any) -> tuple[Any, None]:
            dq, dk, dv = sums
            number, queries, lse, delta = one
            q, g = queries.arrays

            def work(kept: Any) -> Any:
                _, dk, dv = kept
                mask = _mask(plan, queries.rows, block.rows, has_fill)
                scores = _product(plan, "bhgqd,bhkd->bhgqk", q, k) * plan.scale
                weights = _exponents(scores, lse, mask)
                of_weights = _product(plan, "bhgqd,bhkd->bhgqk", g, v)
                of_scores = weights * (of_weights - delta[..., None]) * plan.scale
                return (
                    _weighted(plan, "bhgqk,bhkd->bhgqd", of_scores, k),
                    dk + _weighted(plan, "bhgqk,bhgqd->bhkd", of_scores, q),
                    dv + _weighted(plan, "bhgqk,bhgqd->bhkd", weights, g),
                )

            none = (jnp.zeros_like(dq[0]), dk, dv)
            more, dk, dv = _where_seen(plan, queries.rows, block.rows, is_only, work, none)
            return (dq.at[number].add(more), dk, dv), None

        of_all = (jnp.arange(count), of_rows, given.lse, given.delta)
        zeros = (jnp.zeros(k.shape, dq.dtype), jnp.zeros(v.shape, dq.dtype))
        (dq, dk, dv), _ = jax.lax.scan(of_pair, (dq, *zeros), of_all)
        return dq, (dk.astype(to), dv.astype(to))

    dq, (dk, dv) = jax.lax.scan(of_block, dq, of_keys)
    return dq, dk, dv


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(
    plan: Plan, q: jax.Array, rows: Rows, k: jax.Array, v: jax.Array, keys: Rows
) -> jax.Array:
    """Return the attention of queries to keys that are all on this device.

    Args:
        plan: The mask, the scale and the blocks.
        q: Queries `[b, t, heads, d]`.
        rows: Their positions and segments.
        k: Keys `[b, s, kv_heads, d]`.
        v: Values `[b, s, kv_heads, d]`.
        keys: The positions and segments of keys.
    """
    return _attend(plan, q, rows, k, v, keys)[0]


def _attend(plan: Plan, q: Any, rows: Rows, k: Any, v: Any, keys: Rows) -> tuple[Any, Any]:
    of_keys, length = cut_keys(plan, k, v, keys), k.shape[1]
    sums = add_keys(plan, q, rows, of_keys, length, no_sums(plan, q, k, v))
    out, lse = finish(sums, q.shape[1], q.dtype)
    return out, (q, rows, of_keys, keys, out, lse)


def _attend_back(plan: Plan, kept: Any, gradient: jax.Array) -> Any:
    q, rows, of_keys, keys, out, lse = kept
    given, length = cotangents(gradient, out, lse), len(keys.numbers)
    start = no_gradient(q, lse, of_keys.arrays[0].shape[2])
    dq, dk, dv = add_gradients(plan, q, rows, given, of_keys, length, start, q.dtype)
    return join_gradient(dq, q), None, join_keys(dk, length), join_keys(dv, length), None


attend.defvjp(_attend, _attend_back)


def default_scale(d: int) -> float:
    """Return the scale of scores of heads with `d` entries."""
    return 1 / math.sqrt(d) if d else 1.0
