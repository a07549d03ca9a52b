"""An all-reduce of many leaves in packs of whole leaves, without copies."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from jaxdist._collectives.algorithms import hide_complex_constant
from jaxdist._collectives.marks.after import order_after
from jaxdist._collectives.sums.packing import group_by_dtype


def plan_packs(sizes: Sequence[tuple[int, Any]], bytes_per_pack: int) -> list[list[int]]:
    """Return which leaves are reduced together, from their bytes and dtypes; the last leaf first.

    A pack is closed when it has exceeded `bytes_per_pack`. Each pack has one dtype.
    """
    packs: list[list[int]] = []
    open_packs: dict[Any, tuple[list[int], int]] = {}
    # Backpropagation computes the gradient of the last leaf first. So the first pack can be reduced
    # while the other gradients are computed.
    for number in reversed(range(len(sizes))):
        size, dtype = sizes[number]
        pack, filled = open_packs.get(dtype, ([], 0))
        if not pack:
            packs.append(pack)
        pack.append(number)
        open_packs[dtype] = (pack, filled + size) if filled + size <= bytes_per_pack else ([], 0)
    return packs


@dataclasses.dataclass(frozen=True)
class LeafPacks:
    """One all-reduce of XLA for each pack of leaves, one after the other.

    The TPU compiler limits how many bytes of program results it combines, to about 15 MiB. So a
    barrier also follows the last pack, which no other pack waits for.

    Args:
        axes: The replica axes.
        bytes_per_pack: The bytes at which a pack is closed.
        num_packs: The number of packs for each dtype instead. If both are 0, there is one pack.
    """

    axes: tuple[str, ...]
    bytes_per_pack: int = 0
    num_packs: int = 0

    def __call__(self, arrays: list[jax.Array]) -> Sequence[jax.Array]:
        """Return the sums. Each pack depends on the one before, or XLA would combine them."""
        results: list[Any] = list(arrays)
        before: list[jax.Array] = []
        packs = self.packs(arrays)
        for number, pack in enumerate(packs):
            operands = [hide_complex_constant(arrays[i]) for i in pack]
            # See Note [Collectives that stay apart].
            if before:
                operands = order_after(before, operands)
            before = list(jax.lax.psum(operands, self.axes))
            # The barrier makes the sums of the last pack an intermediate value, which has no such
            # limit. A bare `psum` of one pack gets no barrier.
            if number == len(packs) - 1 and self != LeafPacks(self.axes):
                before = list(jax.lax.optimization_barrier(before))
            for i, total in zip(pack, before, strict=True):
                results[i] = total
        return results

    def packs(self, leaves: Sequence[Any]) -> list[list[int]]:
        """Return which leaves are reduced together."""
        sizes = [(x.size * x.dtype.itemsize, x.dtype) for x in leaves]
        if self.bytes_per_pack:
            return plan_packs(sizes, self.bytes_per_pack)
        if not self.num_packs:
            return [list(range(len(leaves)))]
        return [p for numbers in group_by_dtype(leaves) for p in self._divide(numbers, sizes)]

    def largest_bytes(self, leaves: Sequence[Any]) -> int:
        """Return the bytes of the largest pack."""
        sizes = [x.size * x.dtype.itemsize for x in leaves]
        return max(sum(sizes[i] for i in pack) for pack in self.packs(leaves))

    def _divide(self, numbers: list[int], sizes: list[tuple[int, Any]]) -> list[list[int]]:
        """Divide neighbours into at most `num_packs` packs of about the same bytes."""
        share = sum(sizes[i][0] for i in numbers) / self.num_packs
        packs: list[list[int]] = [[]]
        filled = 0
        for i in numbers:
            # Compared with the sum of the shares so far, one large leaf does not shift all later
            # packs.
            if packs[-1] and len(packs) < self.num_packs and filled >= share * len(packs):
                packs.append([])
            packs[-1].append(i)
            filled += sizes[i][0]
        return packs
