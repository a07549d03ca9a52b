"""The default all-reduce: packing of small leaves on CPU, and the choice of an algorithm."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax

from jaxdist import cost
from jaxdist._collectives.algorithms.algorithm import group_all
from jaxdist._collectives.algorithms.by_name import Auto, make_auto
from jaxdist._collectives.algorithms.one_level import hide_complex_constant
from jaxdist._collectives.marks import (
    AllReducePlan,
    Summing,
    bind_all_reduce,
    note_ignored,
    note_plan,
    order_after,
)
from jaxdist._collectives.options import CommunicationOptions
from jaxdist._collectives.sums.packing import (
    Alone,
    Entry,
    Packing,
    SmallTogether,
    SumBySize,
    group_by_dtype,
)
from jaxdist._mesh import ReplicaMesh


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


XLA = "xla"
# A vector of small leaves is closed when the latency of its all-reduce is 1/16 of the time that
# copying the leaves takes. A larger vector would save almost nothing more.
_LATENCY_PART = 16


def plan_default_sum(
    leaves: Sequence[Any], layout: ReplicaMesh, options: CommunicationOptions
) -> tuple[AllReducePlan, Summing]:
    """Return the plan and the sum for leaves that are given by shape and dtype."""
    if options.bytes_per_pack:
        packs = LeafPacks(layout.replica_axes, math.ceil(options.bytes_per_pack))
        count = len(packs.packs(leaves))
        reason = f"bytes_per_pack={options.bytes_per_pack}: {count} all-reduce(s), last leaf first"
        times = _predict_times(leaves, make_auto(layout), layout)
        return AllReducePlan(XLA, reason, times, pack_bytes=packs.largest_bytes(leaves)), packs
    packing = _choose_packing(leaves, layout)
    choice = make_auto(layout)
    names = _choose_algorithms(leaves, packing or Alone(), choice, layout.num_replicas)
    if packing is None and names == {XLA}:
        return _plan_psum(leaves, layout), LeafPacks(layout.replica_axes)
    plan = AllReducePlan(
        ", ".join(sorted(names)),
        _give_reason(leaves, packing, layout),
        _predict_times(leaves, choice, layout),
    )
    return plan, SumBySize(group_all(layout), (Entry(choice),), packing or Alone())


def sum_by_default(
    arrays: list[jax.Array], layout: ReplicaMesh, options: CommunicationOptions
) -> Sequence[jax.Array]:
    """Return the sums over the replicas; a bare `psum` if XLA does all of the work."""
    if layout.num_virtual is not None:
        return _sum_by_tree(arrays, layout, options)
    plan, how = plan_default_sum(arrays, layout, options)
    if how == LeafPacks(layout.replica_axes):
        # The plan's function lives as long as the trace's notes. Shapes keep no tracers alive.
        sizes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
        note_plan(lambda: _plan_psum(sizes, layout, timed=True))
        return how(arrays)
    return bind_all_reduce(arrays, plan, how)


def _sum_by_tree(
    arrays: list[jax.Array], layout: ReplicaMesh, options: CommunicationOptions
) -> Sequence[jax.Array]:
    """Return the sums of virtual replicas, as a bare `psum`.

    `deterministic=True` replaces the `psum` by a tree later, in an order that packing must not
    change.
    """
    if options.bytes_per_pack:
        note_ignored("bytes_per_pack: with deterministic=True, all sums use one tree")
    note_plan(
        lambda: AllReducePlan(
            "tree", "deterministic=True: pairs, and pairs of pairs, on any devices"
        )
    )
    return LeafPacks(layout.replica_axes)(arrays)


def _choose_packing(leaves: Sequence[Any], layout: ReplicaMesh) -> SmallTogether | None:
    """Return the packing of small leaves into common vectors, or None if it saves no time.

    TPUs and GPUs do not need it, because XLA combines leaves there without copies. Over several
    logical devices, the leaves may have different shardings, which a common vector cannot have.
    """
    if layout.platform != "cpu" or layout.num_logical > 1:
        return None
    link = cost.links_of(layout).across
    below = cost.pack_below(link)
    # A vector has one dtype. So packing needs two small leaves of the same dtype.
    kinds = [str(x.dtype) for x in leaves if 0 < _num_bytes(x) < below]
    if len(set(kinds)) == len(kinds):
        return None
    return SmallTogether(below, int(_LATENCY_PART * link.alpha * link.memory_bytes_per_second))


def _choose_algorithms(
    leaves: Sequence[Any], packing: Packing, choice: Auto, count: int
) -> set[str]:
    """Return the names of the algorithms that the cost model chooses for the vectors."""
    sizes = {
        sum((p.stop - p.start) * leaves[p.leaf].dtype.itemsize for p in pack)
        for pack in packing.packs(leaves)
    }
    return {choice.choose(count, size).name for size in sizes} or {XLA}


def _plan_psum(leaves: Sequence[Any], layout: ReplicaMesh, timed: bool = False) -> AllReducePlan:
    """Return the plan of a bare `psum`."""
    if layout.num_logical > 1:
        reason = "leaves may have different layouts over the logical devices"
    elif layout.platform == "cpu":
        below = cost.pack_below(cost.links_of(layout).across)
        reason = f"no two leaves of one dtype are below {below:,} bytes, so each is reduced alone"
    else:
        reason = f"on {layout.platform} XLA combines leaves without copies"
    times = _predict_times(leaves, make_auto(layout), layout) if timed else ()
    return AllReducePlan(XLA, reason, times)


def _give_reason(leaves: Sequence[Any], packing: SmallTogether | None, layout: ReplicaMesh) -> str:
    """Return the reason for the plan, for `explain`."""
    if packing is None:
        return "the fastest by the cost model"
    link = cost.links_of(layout).across
    small = sum(0 < _num_bytes(x) < packing.below for x in leaves)
    return (
        f"{small} of {len(leaves)} leaves are below {packing.below:,} bytes, where copying them "
        f"together costs less than starting an all-reduce for each ({link.name}: "
        f"{link.alpha * 1e6:.0f} us, {link.memory_bytes_per_second / 1e9:.1f} GB/s)"
    )


def _predict_times(
    leaves: Sequence[Any], choice: Auto, layout: ReplicaMesh
) -> tuple[tuple[str, float], ...]:
    """Return the predicted seconds of every algorithm, for all bytes together."""
    return tuple(choice.predict_times(layout.num_replicas, sum(map(_num_bytes, leaves))))


def _num_bytes(leaf: Any) -> int:
    """Return the size of a leaf in bytes."""
    return int(leaf.size) * int(leaf.dtype.itemsize)
