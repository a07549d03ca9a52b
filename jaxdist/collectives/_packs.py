"""An all-reduce of many leaves, cut into packs."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxdist import _compat
from jaxdist._typing import AxisNames


def plan_packs(sizes: Sequence[tuple[int, Any]], bytes_per_pack: int) -> list[list[int]]:
    """Which leaves are reduced together, from their bytes and dtypes; the last leaf first.

    A pack is closed when it has exceeded `bytes_per_pack`; dtypes are not mixed.
    """
    packs: list[list[int]] = []
    open_packs: dict[Any, tuple[list[int], int]] = {}
    for number in reversed(range(len(sizes))):
        size, dtype = sizes[number]
        pack, filled = open_packs.get(dtype, ([], 0))
        if not pack:
            packs.append(pack)
        pack.append(number)
        open_packs[dtype] = (pack, filled + size) if filled + size <= bytes_per_pack else ([], 0)
    return packs


def summed_in_packs(
    arrays: Sequence[jax.Array], axes: AxisNames, bytes_per_pack: int
) -> list[jax.Array]:
    """The sum over the replicas of every array, in one all-reduce for each pack.

    The operands of each pack are made to depend on the pack before it, or XLA would put the packs
    together again.
    """
    sizes = [(x.size * x.dtype.itemsize, x.dtype) for x in arrays]
    results: list[Any] = [None] * len(arrays)
    before: list[jax.Array] = []
    for pack in plan_packs(sizes, bytes_per_pack):
        operands = [arrays[i] for i in pack]
        if before:
            operands = _after(before, operands)
        sums = jax.lax.psum(operands, axes)
        before = list(sums)
        for i, total in zip(pack, sums, strict=True):
            results[i] = total
    return results


def _after(before: list[jax.Array], operands: list[jax.Array]) -> list[jax.Array]:
    """The operands as they are, but not before all of `before` is there."""
    if _compat.BARRIERS_HOLD:
        held = jax.lax.optimization_barrier((*operands, *before))
        return list(held[: len(operands)])
    never = jnp.zeros((), bool)
    for total in before:
        never = never | _never(jax.lax.stop_gradient(total))
    return [jnp.where(never, jnp.zeros_like(x), x) for x in operands]


def _never(array: jax.Array) -> jax.Array:
    """False, computed from an array in a way that XLA does not see through."""
    if not array.size:
        return jnp.zeros((), bool)
    first = array.ravel()[0]
    if jnp.issubdtype(first.dtype, jnp.integer):
        # No square leaves 2 when it is divided by 4.
        return (first * first) % 4 == 2
    first = first.real
    return jnp.isnan(first) & jnp.isinf(first)
