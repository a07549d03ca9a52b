"""The cost of one compiled collective: bytes between workers, and predicted time."""

import collections
import dataclasses
from collections.abc import Sequence

from jaxdist import cost
from jaxdist.hlo import EXCHANGES, CompiledCollective


@dataclasses.dataclass(frozen=True)
class Spread:
    """How the groups of a collective spread over workers.

    Attributes:
        workers: The most workers that one group has devices in.
        local: The fewest devices that a group has in one of its workers.
    """

    workers: int
    local: int


def find_spread(c: CompiledCollective, workers: Sequence[int]) -> Spread:
    """Return how the groups, or the pairs of a permutation, spread over workers.

    Args:
        c: The collective.
        workers: The worker of each device, by the number of the device in the program.
    """
    together = c.pairs or c.groups
    most, local = 1, max((len(group) for group in together), default=1)
    for group in together:
        counts = collections.Counter(workers[d] for d in group)
        most = max(most, len(counts))
        local = min(local, *counts.values())
    return Spread(most, local)


def count_bytes_between(c: CompiledCollective, size: int, spread: Spread) -> float:
    """Return the least bytes that one GPU sends over its own network card.

    The GPUs of a group in one NVLink domain first exchange over NVLink. Then each of them sends its
    share between domains. An all-to-all has nothing to share.
    """
    if c.kind == "collective-permute":
        return float(size)
    if c.kind in EXCHANGES:
        return (c.group_size - spread.local) / c.group_size * size
    if c.kind == "collective-broadcast":
        return size / spread.local
    rounds = 2 if c.kind == "all-reduce" else 1
    return rounds * (spread.workers - 1) / spread.workers * size / spread.local


def predict_seconds(
    c: CompiledCollective,
    size: int,
    crosses: bool,
    spread: Spread,
    workers: Sequence[int],
    links: cost.Links,
) -> float:
    """Return the predicted time of one run of a collective."""
    num_groups = 1 if c.kind == "collective-permute" else len(c.groups)
    n = max(c.group_size, 2) if c.kind == "collective-permute" else c.group_size
    # The cost of a permutation is that of one pair: all pairs send at the same time.
    # An all-to-all is one exchange, whose operands are its parts.
    operands = 1 if c.kind == "all-to-all" else c.operands
    if not crosses:
        return cost.collective_seconds(c.kind, n, size, links.inner, operands, num_groups)
    has_curves = links.inner.curve is not None and links.across.curve is not None
    count = len(set(workers))
    whole = len(c.groups) == 1 and c.group_size == len(workers)
    if not has_curves and c.kind == "all-reduce" and whole and len(workers) % count == 0:
        return cost.seconds("xla", c.group_size, size, links, len(workers) // count, c.operands)
    if not has_curves:
        return cost.collective_seconds(c.kind, n, size, links.across, operands, num_groups)
    local = 1 if c.kind == "collective-permute" else spread.local
    return cost.collective_seconds(c.kind, n, size, links, operands, num_groups, local)
