"""An all-reduce of many leaves in packs of whole leaves, without copies."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from jaxdist._collectives.algorithms import opaque
from jaxdist._collectives.marks.after import after
from jaxdist._collectives.sums.packing import by_dtype


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


@dataclasses.dataclass(frozen=True)
class LeafPacks:
    """One all-reduce of XLA for each pack of leaves, one after the other.

    The TPU compiler puts only so many bytes together of sums that are results of the program
    itself: some 15 MiB. So the last pack, which no other waits for, is held together too.

    Args:
        axes: The replica axes.
        bytes_per_pack: The bytes at which a pack is closed.
        num_packs: Or the number of packs for each dtype; with 0 of both there is one.
    """

    axes: tuple[str, ...]
    bytes_per_pack: int = 0
    num_packs: int = 0

    def __call__(self, arrays: list[jax.Array]) -> Sequence[jax.Array]:
        """The sums; each pack depends on the one before, or XLA would put them together."""
        results: list[Any] = list(arrays)
        before: list[jax.Array] = []
        packs = self.packs(arrays)
        for number, pack in enumerate(packs):
            operands = [opaque(arrays[i]) for i in pack]
            if before:
                operands = after(before, operands)
            before = list(jax.lax.psum(operands, self.axes))
            if number == len(packs) - 1 and self != LeafPacks(self.axes):
                before = list(jax.lax.optimization_barrier(before))
            for i, total in zip(pack, before, strict=True):
                results[i] = total
        return results

    def packs(self, leaves: Sequence[Any]) -> list[list[int]]:
        """Which leaves are reduced together."""
        sizes = [(x.size * x.dtype.itemsize, x.dtype) for x in leaves]
        if self.bytes_per_pack:
            return plan_packs(sizes, self.bytes_per_pack)
        if not self.num_packs:
            return [list(range(len(leaves)))]
        return [p for numbers in by_dtype(leaves) for p in self._divided(numbers, sizes)]

    def largest(self, leaves: Sequence[Any]) -> int:
        """The bytes of the largest pack."""
        sizes = [x.size * x.dtype.itemsize for x in leaves]
        return max(sum(sizes[i] for i in pack) for pack in self.packs(leaves))

    def _divided(self, numbers: list[int], sizes: list[tuple[int, Any]]) -> list[list[int]]:
        """Neighbours in at most `num_packs` groups, each closed when it has its share."""
        share = sum(sizes[i][0] for i in numbers) / self.num_packs
        packs: list[list[int]] = [[]]
        filled = 0
        for i in numbers:
            if packs[-1] and len(packs) < self.num_packs and filled >= share * len(packs):
                packs.append([])
            packs[-1].append(i)
            filled += sizes[i][0]
        return packs
