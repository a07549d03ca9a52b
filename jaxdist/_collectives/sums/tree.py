"""Reductions in one fixed order for any number of devices.

# Note [One tree for any number of devices]
The values of `V` replicas, `V` a power of two, are combined in pairs, the pairs in pairs, and so
on: one binary tree over the replicas. A device that has `V/R` of them combines its own subtree.
Then the devices exchange their results with neighbours in the tree, which are 1, 2, 4, ... devices
away. Every addition has the same operands in the same places for every `R`, so the result has the
same bits. `deterministic=True` needs that, and `V` and `R` must be powers of two for it.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from jaxdist._collectives.marks import assume_replicated
from jaxdist._typing import AxisNames
from jaxdist._values import Combine, combine_pairwise

# Leaves up to this many bytes share one buffer, because the latency of an exchange dominates its
# cost. Larger leaves gain nothing from the copy.
PACKED_BYTES = 64 * 1024
# Buffers up to this many bytes are gathered in one exchange: one latency instead of `log2 R`.
GATHERED_BYTES = 256 * 1024


def reduce_by_tree(
    stacks: Sequence[jax.Array], combine: Combine, axes: AxisNames, num_places: int
) -> list[jax.Array]:
    """Combine the rows of all devices in the order of the tree, inside `shard_map`.

    Shapes:
        In: `[V/R, ...]` on each of `R` devices. Out: `[...]`, the same on all.

    Cost:
        `log2 R` exchanges of the bytes of one row. Small arrays of one dtype share a buffer.

    Args:
        stacks: Arrays of the rows of this device's replicas.
        combine: An elementwise, commutative operation of two arrays.
        axes: The mesh axes of the devices.
        num_places: `R`, a power of two.
    """
    # Without these barriers, XLA could fuse a product with the first sum into a fused multiply-add,
    # which rounds once instead of twice. Whether it does depends on the number of devices.
    held = jax.lax.optimization_barrier(tuple(stacks))
    whole = list(
        jax.lax.optimization_barrier(tuple(combine_pairwise(rows, combine) for rows in held))
    )
    for numbers in _group_small(whole) if num_places > 1 else ():
        if len(numbers) == 1:
            (number,) = numbers
            whole[number] = _exchange(whole[number], combine, axes, num_places)
            continue
        joined, divide = ravel_pytree([whole[i] for i in numbers])
        parts = divide(_exchange(joined, combine, axes, num_places))
        for i, part in zip(numbers, parts, strict=True):
            whole[i] = part
    # The barrier also separates the result from the operations that use it.
    same = jax.lax.optimization_barrier(tuple(map(_unify_nans, whole)))
    return [assume_replicated(x) for x in same]


def _group_small(arrays: Sequence[jax.Array]) -> list[list[int]]:
    """Return which arrays share a buffer."""
    small: dict[Any, list[int]] = {}
    packs: list[list[int]] = []
    for i, array in enumerate(arrays):
        if array.size * array.dtype.itemsize > PACKED_BYTES:
            packs.append([i])
        else:
            small.setdefault(array.dtype, []).append(i)
    return [*small.values(), *packs]


def _exchange(own: jax.Array, combine: Combine, axes: AxisNames, num_places: int) -> jax.Array:
    """Combine the arrays of the devices in the order of their subtrees.

    This is a butterfly: after the step of distance `d`, blocks of `2 d` devices have the result of
    their subtree. Small arrays are gathered instead, and every device computes the rest of the
    tree.
    """
    if not own.size:
        return own
    if own.size * own.dtype.itemsize <= GATHERED_BYTES:
        rows = jax.lax.all_gather(own, axes)
        return combine_pairwise(jax.lax.optimization_barrier(rows), combine)
    distance = 1
    while distance < num_places:
        # `combine` is commutative, so the two partners get the same bits from swapped operands.
        pairs = [(i, i ^ distance) for i in range(num_places)]
        own = combine(own, jax.lax.ppermute(own, axes, pairs))
        distance *= 2
    return own


def _unify_nans(array: jax.Array) -> jax.Array:
    """Replace every nan by the same nan.

    Of two nans, the hardware keeps the bits of the first operand, and devices differ in which is
    first.
    """
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        return jax.lax.complex(_unify_nans(array.real), _unify_nans(array.imag))
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return array
    return jnp.where(jnp.isnan(array), jnp.full_like(array, jnp.nan), array)
