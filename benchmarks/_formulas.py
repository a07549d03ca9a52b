"""The collectives that each all-reduce algorithm should compile to.

`steps` writes down the algorithm: which collectives, between which replicas. `compiled` says what
XLA makes of a step. On CPU and within one slice of TPUs that is one operation, with one exception.
The TPU compiler has no reduce-scatter of its own: it is an all-reduce of which a slice is taken (in
one fusion, where it pays). Between slices:

- A permute with pairs inside slices and pairs between them is two operations, for two networks.
- An all-reduce over whole slices is three: reduced and scattered inside each, all-reduced between
  them by devices of the same place, gathered inside.
- An all-gather over whole slices is two, if its result has slice after slice: between them, then
  inside. In any other order one operation sends everything to all.
- All-reduces over the same groups that wait for nothing are put together. So the first parts of
  the shards of an all-reduce over slices are one operation. Across slices there is one for each.
"""

import dataclasses
from collections import Counter
from collections.abc import Sequence

Groups = Sequence[Sequence[int]]
Counted = Counter[tuple[str, str]]  # kind and scope

WITHIN, ACROSS, BETWEEN = "within", "across", "between slices"
_HALVES = {"nccl": "reduce-scatter", "pscpu": "all-to-all"}


@dataclasses.dataclass(frozen=True)
class Step:
    """One collective: its groups of replicas, or the pairs of a permute."""

    kind: str
    groups: Groups


def steps(name: str, count: int, local: int, platform: str, first: int = 0) -> list[Step]:
    """The steps of an all-reduce of one vector over `count` replicas.

    Args:
        name: As in the specs of `MultiWorkerAllReduce`.
        count: Replicas.
        local: Replicas of each worker.
        platform: Where it runs; on CPU the host is the device.
        first: The replica that counts as the first: shard `i` counts from replica `i`.
    """
    everyone = [[(first + i) % count for i in range(count)]]
    inner, _, outer = name.partition("/")
    if not outer or local == count:
        return _flat(inner, everyone, platform)
    if local == 1:
        return _flat(outer, everyone, platform)
    workers = [list(range(i, i + local)) for i in range(0, count, local)]
    across = [list(range(i, count, local)) for i in range(local)]
    return [
        Step(_HALVES[inner], workers),
        *_flat(outer, across, platform),
        Step("all-gather", workers),
    ]


def _flat(name: str, groups: Groups, platform: str) -> list[Step]:
    n = len(groups[0])
    if name == "nccl":
        return [Step("all-reduce", groups)]
    if name == "pscpu" and platform != "cpu":
        return [Step("all-gather", groups)]
    routes = {"xring": _ring, "rechd": _halving, "pscpu": _tree, "psgpu": _tree}[name](n)
    return [
        Step("collective-permute", [(g[a], g[b]) for g in groups for a, b in r]) for r in routes
    ]


def _ring(n: int) -> list[list[tuple[int, int]]]:
    """Round the ring twice, less one step each."""
    return [[(i, (i + 1) % n) for i in range(n)]] * (2 * (n - 1))


def _tree(n: int) -> list[list[tuple[int, int]]]:
    """Up a binomial tree, and down."""
    up = []
    distance = 1
    while distance < n:
        up.append([(i + distance, i) for i in range(0, n - distance, 2 * distance)])
        distance *= 2
    return [*up, *([(b, a) for a, b in route] for route in reversed(up))]


def _halving(n: int) -> list[list[tuple[int, int]]]:
    """Halving and doubling among a power of two; the others give to a neighbour, and get back."""
    core = 1 << (n.bit_length() - 1)
    extra = n - core
    places = [2 * i if i < extra else i + extra for i in range(core)]
    exchanges = []
    distance = core // 2
    while distance:
        exchanges.append([(places[i], places[i ^ distance]) for i in range(core)])
        distance //= 2
    before = [[(2 * i + 1, 2 * i) for i in range(extra)]] if extra else []
    after = [[(b, a) for a, b in before[0]]] if extra else []
    return [*before, *exchanges, *reversed(exchanges), *after]


def expected(
    name: str, shards: int, count: int, local: int, platform: str, slice_size: int
) -> Counted:
    """The operations of the compiled program, of a vector in `shards` all-reduces."""
    found: Counted = Counter()
    for shard in range(shards):
        for step in steps(name, count, local, platform, shard):
            found += compiled(step, local, platform, slice_size)
    over_slices = platform == "tpu" and slice_size < count
    if over_slices and name == "nccl":
        found["all-reduce", WITHIN] = 1
    return found


def compiled(step: Step, local: int, platform: str, slice_size: int) -> Counted:
    """What XLA makes of a step."""
    if platform != "tpu":
        return Counter([(step.kind, scope(step.groups, local))])
    kind = "all-reduce" if step.kind == "reduce-scatter" else step.kind
    if kind == "collective-permute":
        crossing = [r // slice_size != s // slice_size for r, s in step.groups]
        inside = [pair for pair, crosses in zip(step.groups, crossing, strict=True) if not crosses]
        found: Counted = Counter({(kind, BETWEEN): 1} if any(crossing) else {})
        return found + Counter([(kind, scope(inside, local))] if inside else [])
    slices = [[r // slice_size for r in group] for group in step.groups]
    if all(len(set(own)) == 1 for own in slices):
        return Counter([(kind, scope(step.groups, local))])
    if all(len(set(own)) == len(own) for own in slices):
        return Counter([(kind, BETWEEN)])
    if kind == "all-reduce":
        return Counter([(kind, WITHIN), (kind, BETWEEN), ("all-gather", WITHIN)])
    in_order = all(list(group) == sorted(group) for group in step.groups)
    return Counter([(kind, BETWEEN), *([(kind, WITHIN)] if in_order else [])])


def scope(groups: Groups, local: int) -> str:
    """Whether groups stay within workers of `local` replicas."""
    is_within = all(len({r // local for r in group}) == 1 for group in groups)
    return WITHIN if is_within else ACROSS


def in_words(counted: Counted) -> str:
    """`2 all-gather within, 1 all-reduce across`."""
    named = sorted((kind, where, number) for (kind, where), number in counted.items() if number)
    return ", ".join(f"{number} {kind} {where}" for kind, where, number in named) or "none"
