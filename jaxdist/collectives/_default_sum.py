"""How an all-reduce goes where nothing else is asked for."""

import math
from collections.abc import Sequence
from typing import Any

import jax

from jaxdist import cost
from jaxdist.collectives._options import CommunicationOptions
from jaxdist.collectives._packing import SmallTogether
from jaxdist.collectives._packs import LeafPacks
from jaxdist.collectives._reduction import Plan, Summing, reduced
from jaxdist.collectives._sum_by_size import Entry, SumBySize
from jaxdist.collectives.algorithms import InShards, Xla, whole
from jaxdist.mesh import ReplicaMesh

# A vector of small leaves is closed when starting its all-reduce is this part of copying it.
_LATENCY_PART = 16


def default_summing(
    leaves: Sequence[Any], layout: ReplicaMesh, options: CommunicationOptions
) -> tuple[Plan, Summing]:
    """The plan for leaves that are given by shape and dtype."""
    if options.bytes_per_pack:
        packs = LeafPacks(layout.replica_axes, math.ceil(options.bytes_per_pack))
        count = len(packs.packs(leaves))
        reason = f"bytes_per_pack={options.bytes_per_pack}: {count} all-reduce(s), last leaf first"
        return Plan("xla", reason), packs
    small = _small_ones(leaves, layout)
    if small is not None:
        return small
    reason = "all leaves are large, or XLA packs them itself"
    return Plan("xla", reason), LeafPacks(layout.replica_axes)


def summed_by_default(
    arrays: list[jax.Array], layout: ReplicaMesh, options: CommunicationOptions
) -> Sequence[jax.Array]:
    """The sums over the replicas; a bare `psum` where there is nothing to say about it."""
    plain = LeafPacks(layout.replica_axes)
    if not options.bytes_per_pack and _small_ones(arrays, layout) is None:
        return plain(arrays)
    return reduced(arrays, *default_summing(arrays, layout, options))


def _small_ones(leaves: Sequence[Any], layout: ReplicaMesh) -> tuple[Plan, Summing] | None:
    """Small leaves in common vectors, where that is faster; None where there are none."""
    if layout.platform != "cpu":
        return None
    link = cost.links_of(layout).across
    below = cost.pack_below(link)
    kinds = [str(x.dtype) for x in leaves if 0 < x.size * x.dtype.itemsize < below]
    if len(kinds) < 2 or len(set(kinds)) == len(kinds):
        return None
    limit = max(below, int(_LATENCY_PART * link.alpha * link.memory_bytes_per_second))
    reason = (
        f"{len(kinds)} of {len(leaves)} leaves are below {below:,} bytes, where copying them "
        f"together costs less than starting an all-reduce ({link.name}: "
        f"{link.alpha * 1e6:.0f} us, {link.memory_bytes_per_second / 1e9:.1f} GB/s)"
    )
    together = SmallTogether(below, limit)
    entry = Entry(InShards(Xla(), 1), -1)
    summing = SumBySize(whole(layout), (entry,), together)
    return Plan("xla, small leaves together", reason), summing
