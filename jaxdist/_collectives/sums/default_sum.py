"""The default all-reduce: packing of small leaves on CPU, and the choice of an algorithm."""

import math
from collections.abc import Sequence
from typing import Any

import jax

from jaxdist import cost
from jaxdist._collectives.algorithms import Auto, group_all, make_auto
from jaxdist._collectives.marks.plan import AllReducePlan
from jaxdist._collectives.marks.reduction import Summing, bind_all_reduce
from jaxdist._collectives.marks.trace_notes import note_ignored, note_plan
from jaxdist._collectives.options.options import CommunicationOptions
from jaxdist._collectives.sums.packing import Alone, Packing, SmallTogether
from jaxdist._collectives.sums.packs import LeafPacks
from jaxdist._collectives.sums.sum_by_size import Entry, SumBySize
from jaxdist._mesh import ReplicaMesh

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
        note_ignored("bytes_per_pack: with deterministic=True sums go by one tree")
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
        reason = "leaves may lie in different layouts over the logical devices"
    elif layout.platform == "cpu":
        below = cost.pack_below(cost.links_of(layout).across)
        reason = f"no two leaves of one dtype are below {below:,} bytes, so each goes alone"
    else:
        reason = f"on {layout.platform} XLA puts leaves together without copies"
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
