"""Predicts the time of a collective of NCCL. See Note [Size curve].

A group has n GPUs with S bytes each; `local` of them are in each NVLink domain, and there are
n / local domains.

A ring passes through all n GPUs. Most of its steps stay on NVLink, and one step for each domain
crosses the network. There the network cards of all `local` GPUs work at the same time. So the
ring's bandwidth is that of NVLink or of `local` cards, whichever is less.

A tree has fewer steps, and each sends all bytes. It sends them in chunks. With the best chunk, a
pipeline of bytes that alone take B seconds and of steps that alone take L seconds takes
(sqrt(B) + sqrt(L))^2: Sanders, Speck and Traeff, Two-tree algorithms for full bandwidth broadcast,
reduction and scan (2009). NCCL has trees for all-reduces only. Their steps are those of NCCL's own
model (src/graph/tuning.cc): a chain through the GPUs of a host, and a binary tree over the hosts.
"""

import dataclasses
import math

from jaxdist.cost._curve import SMALL_PART, SizeCurve
from jaxdist.cost._link import Links
from jaxdist.hlo import EXCHANGES

_WHOLE = ("collective-permute", "collective-broadcast")  # each GPU sends all its bytes


@dataclasses.dataclass(frozen=True)
class _Level:
    """A link that a group uses.

    Attributes:
        curve: The size curve of the link.
        rate: Bytes per second that one GPU sends over it.
        members: The number of GPUs, or of domains, that the link joins.
        ring_steps: The steps of one round of a ring that use the link.
        parts: How many of the n parts of an array a GPU sends over it in an all-to-all.
        side_by_side: The number of such links that a ring uses at the same time.
    """

    curve: SizeCurve
    rate: float
    members: int
    ring_steps: int
    parts: int
    side_by_side: int

    @property
    def tree_steps(self) -> int:
        """The steps from a leaf of a tree to its root."""
        chain = self.curve.chain
        return min(self.members, chain) - 1 + math.ceil(math.log2(max(1, self.members / chain)))


def predict_nccl(kind: str, n: int, size: float, links: Links, local: int) -> float | None:
    """Return the time of one collective, or None if a link that it uses has no size curve.

    Args:
        kind: The name in HLO, such as `all-gather`.
        n: The number of GPUs in a group.
        size: The bytes of the whole array on one GPU.
        links: The links inside an NVLink domain and between domains.
        local: The number of GPUs of the group in one domain.
    """
    if kind == "collective-permute":
        # All pairs send at the same time, so the time is that of one pair.
        n, local = min(n, 2), 2 if local >= n else 1
    levels = _list_levels(n, links, min(local, n))
    if levels is None:
        return None
    if not levels:
        return 0.0
    rounds = 2 if kind == "all-reduce" else 1
    latency = rounds * sum(level.ring_steps * level.curve.step_seconds for level in levels)
    if kind in EXCHANGES:
        # Both links work at the same time, and each GPU uses only its own network card.
        moving = max(x.parts / n * size / (x.rate * x.curve.part) for x in levels)
    else:
        bytes_sent = size if kind in _WHOLE else rounds * (n - 1) / n * size
        summed_by_switch = kind == "all-reduce" and len(levels) == 1
        moving = bytes_sent / min(
            level.side_by_side
            * level.rate
            * (level.curve.all_reduce_part if summed_by_switch else level.curve.part)
            for level in levels
        )
    found = [latency + moving]
    small_step = levels[0].curve.small_step_seconds
    # Published times of groups over several hosts show no faster protocol for few bytes.
    if len(levels) == 1 and small_step is not None:
        found.append(rounds * levels[0].ring_steps * small_step + moving / SMALL_PART)
    if kind == "all-reduce":
        climbing = rounds * sum(x.tree_steps * x.curve.step_seconds for x in levels)
        found.append((math.sqrt(moving) + math.sqrt(climbing)) ** 2)
    return min(found)


def _list_levels(n: int, links: Links, local: int) -> list[_Level] | None:
    """Return the levels that a group uses, or None if one has no size curve."""
    workers = math.ceil(n / local)
    levels = []
    for link, members, ring_steps, parts, side_by_side in (
        (links.inner, local, n - workers, local - 1, 1),
        (links.across, workers, workers - 1, n - local, local),
    ):
        if members > 1:
            if link.curve is None:
                return None
            rate = link.bytes_per_second
            levels.append(_Level(link.curve, rate, members, ring_steps, parts, side_by_side))
    return levels
