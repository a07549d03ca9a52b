"""Reductions in one fixed order, whatever number of devices holds the values.

The values of `V` replicas, `V` a power of two, are combined in pairs, the pairs in pairs, and so
on: one binary tree over the replicas. A device that holds `V/R` of them combines its own subtree;
the devices then exchange what they have with their neighbours in the tree, 1, 2, 4, ... places
away. Every addition has the same operands in the same places for every `R`, so the bits of the
result are the same.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxdist._typing import AxisNames
from jaxdist.collectives._mark import assume_replicated
from jaxdist.values import Combine, in_pairs

# Leaves up to this many bytes travel together in one buffer; an exchange of a small one costs its
# latency. Larger ones gain nothing from a copy.
PACKED_BYTES = 64 * 1024


def tree_reduced(
    stacks: Sequence[jax.Array], combine: Combine, axes: AxisNames, num_places: int
) -> list[jax.Array]:
    """Combine the rows of all devices, in the order of the tree, inside `shard_map`.

    Shapes:
        In: `[V/R, ...]` on each of `R` devices. Out: `[...]`, the same on all.

    Cost:
        `log2 R` exchanges of the bytes of one row; small arrays of one dtype travel together.

    Args:
        stacks: Arrays of the rows of this device's replicas.
        combine: An elementwise operation of two arrays.
        axes: The mesh axes of the devices.
        num_places: `R`, a power of two.
    """
    # A product that is fused with the first sum would be rounded once instead of twice.
    held = jax.lax.optimization_barrier(tuple(stacks))
    own = jax.lax.optimization_barrier(tuple(in_pairs(rows, combine) for rows in held))
    if num_places == 1:
        return list(own)
    whole: list[Any] = [None] * len(own)
    for numbers in _packs(own):
        if len(numbers) == 1:
            (number,) = numbers
            whole[number] = _exchanged(own[number], combine, axes, num_places)
            continue
        joined = jnp.concatenate([own[i].ravel() for i in numbers])
        flat, start = _exchanged(joined, combine, axes, num_places), 0
        for i in numbers:
            whole[i] = flat[start : start + own[i].size].reshape(own[i].shape)
            start += own[i].size
    return [assume_replicated(x) for x in jax.lax.optimization_barrier(tuple(whole))]


def _packs(arrays: Sequence[jax.Array]) -> list[list[int]]:
    """Which arrays travel together."""
    small: dict[Any, list[int]] = {}
    packs: list[list[int]] = []
    for i, array in enumerate(arrays):
        if array.size * array.dtype.itemsize > PACKED_BYTES:
            packs.append([i])
        else:
            small.setdefault(array.dtype, []).append(i)
    return [*small.values(), *packs]


def _exchanged(own: jax.Array, combine: Combine, axes: AxisNames, num_places: int) -> jax.Array:
    """A butterfly: after the step of distance `d`, blocks of `2 d` devices hold their subtree."""
    if not own.size:
        return own
    place = jax.lax.axis_index(axes)
    distance = 1
    while distance < num_places:
        pairs = [(i, i ^ distance) for i in range(num_places)]
        other = jax.lax.ppermute(own, axes, pairs)
        # Both partners combine the same two operands in the same places: of two NaNs, the
        # hardware keeps the bits of the first.
        is_second = (place & distance) != 0
        own = combine(jnp.where(is_second, other, own), jnp.where(is_second, own, other))
        distance *= 2
    return own
